//! Signed links.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::common::{Server, service};

async fn with_web() -> (Server, String) {
    let server = Server::start().await;
    server.serve(3000, service::web().await);
    let id = server.sandbox();
    (server, format!("/v1/sandboxes/{id}"))
}

async fn make(server: &Server, sandbox: &str, body: &str) -> Value {
    let (status, link) = server.json(server.post(&format!("{sandbox}/preview"), body)).await;
    assert_eq!(status, 200, "{link}");
    link
}

/// Follows a link, with no token of the API's.
async fn follow(server: &Server, url: &str) -> (u16, Value) {
    server.json(server.client.get(url)).await
}

#[tokio::test]
async fn a_link_leads_to_its_port_without_a_token() {
    let (server, sandbox) = with_web().await;
    for route in ["preview", "preview-token"] {
        let (status, link) = server.json(server.post(&format!("{sandbox}/{route}"), r#"{"port":3000}"#)).await;
        assert_eq!(status, 200);
        assert_eq!((&link["port"], &link["paths"]), (&json!(3000), &json!([])));
        assert!(sandbox.ends_with(link["sandbox_id"].as_str().unwrap()));
        assert!(link["expires_at"].as_str().unwrap().ends_with('Z'));
        let token = link["token"].as_str().unwrap();
        assert_eq!(link["url"], server.url(&format!("/v1/p/{token}/")));
        let url = format!("{}a/b?c=d", link["url"].as_str().unwrap());
        let request = server.client.post(&url).header("Authorization", "Basic theirs").body("x");
        let (status, told) = server.json(request).await;
        assert_eq!((status, &told["target"], &told["method"]), (200, &json!("/a/b?c=d"), &json!("POST")));
        assert_eq!(told["headers"]["authorization"], "Basic theirs", "the service's own");
        let ours = server.client.get(&url).bearer_auth(&server.token);
        assert_eq!(server.json(ours).await.1["headers"]["authorization"], Value::Null);
        assert_eq!(follow(&server, url.trim_end_matches("/a/b?c=d")).await.1["target"], "/");
    }
}

#[tokio::test]
async fn a_link_leads_to_its_paths_only_however_they_are_spelled() {
    let (server, sandbox) = with_web().await;
    let link = make(&server, &sandbox, r#"{"port":3000,"paths":["/docs","/static/"]}"#).await;
    let base = format!("/v1/p/{}", link["token"].as_str().unwrap());
    assert_eq!(link["url"], server.url(&format!("{base}/docs")));
    // Byte by byte: a client library would tidy the path up.
    for (path, status) in [
        ("/docs", 200),
        ("/docs/", 200),
        ("/docs/a?b=/../x", 200),
        ("/static/app.js", 200),
        ("", 403),
        ("/", 403),
        ("/static", 403),
        ("/docsx", 403),
        ("/admin", 403),
        ("/docs/../admin", 403),
        ("/docs/%2e%2e/admin", 403),
        ("/docs/%2E%2e%2fadmin", 403),
        ("/docs/%252e%252e/admin", 403),
        ("/docs//../admin", 403),
        ("//docs", 403),
        ("/docs/..;/admin", 403),
    ] {
        let mut wire = server.wire().await;
        wire.send(format!("GET {base}{path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!(wire.response().await.status, status, "{path}");
    }
    // Another protocol than WebSocket could carry requests for other paths.
    let mut wire = server.wire().await;
    let upgrade = "Connection: Upgrade\r\nUpgrade: tunnel\r\n";
    wire.send(format!("GET {base}/docs HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n")).await;
    assert!(!wire.response().await.text().contains("tunnel"));
}

#[tokio::test]
async fn what_is_no_valid_link_is_refused() {
    let (server, sandbox) = with_web().await;
    let link = make(&server, &sandbox, r#"{"port":3000,"ttl_seconds":1}"#).await;
    let url = link["url"].as_str().unwrap().to_owned();
    let token = link["token"].as_str().unwrap();
    assert_eq!(follow(&server, &url).await.0, 200);
    let first = if token.starts_with('A') { "B" } else { "A" };
    let forged = format!("{first}{}", &token[1..]);
    for (token, status, code) in [
        (forged.as_str(), 401, "forged_preview_link"),
        ("nonsense", 400, "invalid_preview_link"),
        ("a.b", 400, "invalid_preview_link"),
        ("%ff", 400, "invalid_preview_link"),
    ] {
        let (got, body) = follow(&server, &server.url(&format!("/v1/p/{token}/"))).await;
        assert_eq!((got, body["code"].as_str().unwrap()), (status, code), "{token}");
    }
    sleep(Duration::from_millis(2100)).await;
    let (status, body) = follow(&server, &url).await;
    assert_eq!((status, &body["code"]), (401, &json!("preview_link_expired")));
}

#[tokio::test]
async fn links_are_listed_and_revoked_by_their_workspace_only() {
    let (server, sandbox) = with_web().await;
    let first = make(&server, &sandbox, r#"{"port":3000}"#).await;
    let second = make(&server, &sandbox, r#"{"port":3000,"paths":["/a"]}"#).await;
    let previews = format!("{sandbox}/previews");
    let (_, list) = server.json(server.get(&previews)).await;
    let ids: Vec<_> = list.as_array().unwrap().iter().map(|link| &link["id"]).collect();
    assert!(ids.len() == 2 && ids.contains(&&first["id"]) && ids.contains(&&second["id"]), "{list}");
    assert!(!list.to_string().contains(first["token"].as_str().unwrap()));

    let other = server.store.create("other", "x").await.unwrap();
    let one = format!("{previews}/{}", first["id"].as_str().unwrap());
    for (method, path) in [
        (Method::GET, previews.clone()),
        (Method::DELETE, one.clone()),
        (Method::POST, format!("{sandbox}/preview")),
        (Method::POST, format!("{sandbox}/preview-token")),
    ] {
        let request = server.client.request(method, server.url(&path)).bearer_auth(&other).body(r#"{"port":3000}"#);
        assert_eq!(server.json(request).await.0, 404, "{path}");
    }
    let own = server.fake.add_sandbox("other");
    let elsewhere = format!("/v1/sandboxes/{own}/previews/{}", first["id"].as_str().unwrap());
    let request = server.client.delete(server.url(&elsewhere)).bearer_auth(&other);
    assert_eq!(server.json(request).await.0, 404, "by way of a sandbox of their own");
    assert_eq!(follow(&server, first["url"].as_str().unwrap()).await.0, 200);

    assert_eq!(server.call(Method::DELETE, &one).send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.call(Method::DELETE, &one)).await.0, 404);
    assert_eq!(server.json(server.call(Method::DELETE, &format!("{previews}/nope"))).await.0, 404);
    let (status, body) = follow(&server, first["url"].as_str().unwrap()).await;
    assert_eq!((status, &body["code"]), (401, &json!("preview_link_ended")));
    assert_eq!(follow(&server, &format!("{}/x", second["url"].as_str().unwrap())).await.0, 200);
}

#[tokio::test]
async fn links_end_with_their_sandbox() {
    let (server, sandbox) = with_web().await;
    let link = make(&server, &sandbox, r#"{"port":3000}"#).await;
    server.call(Method::DELETE, &sandbox).send().await.unwrap();
    assert_eq!(follow(&server, link["url"].as_str().unwrap()).await.0, 401);
    // One that its host removed, which nobody told us.
    let (server, sandbox) = with_web().await;
    let link = make(&server, &sandbox, r#"{"port":3000}"#).await;
    server.fake.remove_sandbox(sandbox.rsplit('/').next().unwrap());
    assert_eq!(follow(&server, link["url"].as_str().unwrap()).await.0, 404);
    assert_eq!(follow(&server, link["url"].as_str().unwrap()).await.0, 401, "and then it is forgotten");
}

#[tokio::test]
async fn mistakes_are_400_with_a_sentence() {
    let (server, sandbox) = with_web().await;
    for (body, code) in [
        ("", "port_required"),
        (r#"{"port":22}"#, "port_reserved"),
        (r#"{"port":70000}"#, "invalid_port"),
        (r#"{"port":80,"ttl_seconds":0}"#, "invalid_ttl"),
        (r#"{"port":80,"ttl_seconds":604801}"#, "invalid_ttl"),
        (r#"{"port":80,"paths":["docs"]}"#, "invalid_paths"),
        (r#"{"port":80,"paths":["/a/../b"]}"#, "invalid_paths"),
        (r#"{"port":80,"paths":["/a%2fb"]}"#, "invalid_paths"),
        (r#"{"port":80,"paths":"/a"}"#, "invalid_field"),
    ] {
        let (status, answer) = server.json(server.post(&format!("{sandbox}/preview"), body)).await;
        assert_eq!((status, answer["code"].as_str().unwrap()), (400, code), "{body}");
    }
}
