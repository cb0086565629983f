//! Preview hosts.

use coppice_control::ControlConfig;
use reqwest::RequestBuilder;
use serde_json::{Value, json};

use crate::common::{Server, service};

async fn with_web(more: impl FnOnce(&mut ControlConfig)) -> (Server, String) {
    let server = Server::with(|config| {
        config.ingress.suffix = Some("preview.test".parse().unwrap());
        more(config);
    })
    .await;
    server.serve(3000, service::web().await);
    let id = server.sandbox();
    (server, id)
}

/// A request to a preview host, with no token.
fn at(server: &Server, id: &str, path: &str) -> RequestBuilder {
    server.client.get(server.url(path)).header("Host", format!("3000-{id}.Preview.test:1234"))
}

#[tokio::test]
async fn a_preview_host_is_closed_until_it_is_opened() {
    let (server, id) = with_web(|_| {}).await;
    let (status, body) = server.json(at(&server, &id, "/")).await;
    assert_eq!((status, &body["code"]), (401, &json!("preview_not_public")));
    let unknown = id.replace(char::is_numeric, "0");
    assert_eq!(
        server.json(at(&server, &unknown, "/")).await,
        (401, body),
        "it can't be told from one that is not there"
    );

    let opened = server.post(&format!("/v1/sandboxes/{id}/ports"), r#"{"port":3000,"public":true}"#);
    assert_eq!(opened.send().await.unwrap().status(), 201);
    let request = at(&server, &id, "/v1/sandboxes?x=1").header("Authorization", "Bearer theirs");
    let (status, told) = server.json(request.header("Cookie", "a=b; coppice_preview=c")).await;
    assert_eq!((status, &told["target"]), (200, &json!("/v1/sandboxes?x=1")), "every path is the service's");
    let headers = &told["headers"];
    assert_eq!(headers["host"], format!("3000-{id}.Preview.test:1234"));
    assert_eq!((&headers["x-forwarded-host"], &headers["host"]), (&headers["host"], &headers["x-forwarded-host"]));
    assert_eq!((&headers["authorization"], &headers["cookie"]), (&json!("Bearer theirs"), &json!("a=b")));
    assert_eq!(headers["x-forwarded-prefix"], Value::Null);
    let answer = at(&server, &id, "/moved").send().await.unwrap();
    assert_eq!(
        (answer.headers()["location"].to_str().unwrap(), answer.headers()["set-cookie"].to_str().unwrap()),
        ("/elsewhere", "a=b")
    );
    assert!(!answer.headers().contains_key("content-security-policy"));

    let other = server.client.get(server.url("/")).header("Host", format!("3001-{id}.preview.test"));
    assert_eq!(server.json(other).await.0, 401, "another port");
    server.call(reqwest::Method::DELETE, &format!("/v1/sandboxes/{id}/ports/3000")).send().await.unwrap();
    assert_eq!(server.json(at(&server, &id, "/")).await.0, 401);
}

#[tokio::test]
async fn a_token_of_the_workspace_opens_it_and_is_not_passed_on() {
    let (server, id) = with_web(|_| {}).await;
    let (status, told) = server.json(at(&server, &id, "/x").bearer_auth(&server.token)).await;
    assert_eq!((status, &told["headers"]["authorization"]), (200, &Value::Null));
    let other = server.store.create("other", "x").await.unwrap();
    assert_eq!(server.json(at(&server, &id, "/x").bearer_auth(&other)).await.0, 404);
    assert_eq!(server.json(at(&server, &id, "/x").bearer_auth("nonsense")).await.0, 401);
}

#[tokio::test]
async fn a_link_opens_it_and_a_cookie_remembers() {
    let (server, id) = with_web(|_| {}).await;
    let body = r#"{"port":3000,"paths":["/docs"]}"#;
    let (_, link) = server.json(server.post(&format!("/v1/sandboxes/{id}/preview"), body)).await;
    let token = link["token"].as_str().unwrap();
    assert_eq!(link["host_url"], format!("http://3000-{id}.preview.test/docs?coppice_preview={token}"));
    let first = at(&server, &id, &format!("/docs?a=b&coppice_preview={token}")).send().await.unwrap();
    assert_eq!((first.status().as_u16(), first.headers()["location"].to_str().unwrap()), (303, "/docs?a=b"));
    let cookie = first.headers()["set-cookie"].to_str().unwrap();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Lax") && !cookie.contains("Domain"), "{cookie}");
    let cookie = format!("coppice_preview=tossed; {}", cookie.split(';').next().unwrap());
    let with = |path: &str| at(&server, &id, path).header("Cookie", &cookie);
    let (status, told) = server.json(with("/docs/x")).await;
    assert_eq!((status, &told["headers"]["cookie"]), (200, &Value::Null));
    assert_eq!(server.json(with("/admin")).await.0, 403);
    assert_eq!(server.json(with("/docs/../admin")).await.0, 403);
    let other = server.sandbox();
    assert_eq!(server.json(at(&server, &other, "/docs").header("Cookie", &cookie)).await.0, 403);
    let lead_away = at(&server, &id, &format!("//evil.test/?coppice_preview={token}"));
    assert_eq!(server.json(lead_away).await.0, 403);
    let (_, open) = server.json(server.post(&format!("/v1/sandboxes/{id}/preview"), r#"{"port":3000}"#)).await;
    let token = open["token"].as_str().unwrap();
    let mut wire = server.wire().await;
    let head = format!("GET //evil.test/?coppice_preview={token} HTTP/1.1\r\nHost: 3000-{id}.preview.test\r\n\r\n");
    wire.send(head).await;
    assert_eq!(wire.response().await.header("location"), Some("/evil.test/"));
    let revoked = format!("/v1/sandboxes/{id}/previews/{}", link["id"].as_str().unwrap());
    server.call(reqwest::Method::DELETE, &revoked).send().await.unwrap();
    assert_eq!(server.json(with("/docs/x")).await.0, 401);
}

#[tokio::test]
async fn an_operator_can_open_all_of_them() {
    let (server, id) = with_web(|config| {
        config.ingress.public_previews = true;
        config.ingress.public_url = Some("https://api.test".parse().unwrap());
    })
    .await;
    let (status, told) = server.json(at(&server, &id, "/")).await;
    assert_eq!((status, &told["headers"]["x-forwarded-proto"]), (200, &json!("https")));
    assert_eq!(server.json(at(&server, &id.replace(char::is_numeric, "0"), "/")).await.0, 404);
    let (_, list) = server.json(server.get(&format!("/v1/sandboxes/{id}/ports"))).await;
    assert_eq!(list[0]["preview_url"], format!("https://3000-{id}.preview.test"));
    assert!(list[0]["proxy_url"].as_str().unwrap().starts_with("https://api.test/v1/"));
}

#[tokio::test]
async fn other_hosts_are_the_apis() {
    let (server, id) = with_web(|config| config.ingress.public_previews = true).await;
    for host in
        ["preview.test", "api.preview.test", "x", &format!("3000-{id}.example.org"), &format!("22-{id}.preview.test")]
    {
        let (status, body) = server.json(server.client.get(server.url("/healthz")).header("Host", host)).await;
        assert_eq!((status, &body["status"]), (200, &json!("ok")), "{host}");
    }
    let plain = Server::start().await;
    let id = plain.sandbox();
    assert_eq!(plain.json(at(&plain, &id, "/healthz")).await.0, 200, "no suffix, no preview hosts");
}
