//! Ports of a sandbox: the list, and what clients say of them.

use reqwest::Method;
use serde_json::{Value, json};

use crate::common::{Server, service};

#[tokio::test]
async fn what_listens_and_what_was_named_is_one_list() {
    let server = Server::with(|config| config.ingress.suffix = Some("preview.test:8080".parse().unwrap())).await;
    let id = server.sandbox();
    let ports = format!("/v1/sandboxes/{id}/ports");
    assert_eq!(server.json(server.get(&ports)).await, (200, json!([])));
    let web = service::web().await;
    for port in [22, 80, 3000] {
        server.serve(port, web);
    }
    server.fake.loopback.lock().unwrap().push(9000);
    let (status, made) = server.json(server.post(&ports, r#"{"port":3000}"#)).await;
    assert_eq!((status, &made["label"], &made["source"]), (201, &json!("service"), &json!("user")));
    let (_, made) = server.json(server.post(&ports, r#"{"port":5000,"label":" d\u00e9v ","public":true}"#)).await;
    assert_eq!(
        (&made["label"], &made["public"], &made["listening"]),
        (&json!("d\u{e9}v"), &json!(true), &json!(false))
    );

    let (_, list) = server.json(server.get(&ports)).await;
    let seen = |field: &str| list.as_array().unwrap().iter().map(|port| port[field].clone()).collect::<Vec<Value>>();
    assert_eq!(seen("port"), [80, 3000, 5000, 9000]);
    assert_eq!(seen("listening"), [true, true, false, true]);
    assert_eq!(seen("loopback_only"), [false, false, false, true]);
    assert_eq!(seen("source"), ["detected", "user", "user", "detected"]);
    assert_eq!(list[1]["proxy_url"], server.url(&format!("/v1/sandboxes/{id}/proxy/3000/")));
    assert_eq!(list[1]["preview_url"], format!("http://3000-{id}.preview.test:8080"));

    for _ in 0..2 {
        let gone = server.call(Method::DELETE, &format!("{ports}/3000")).send().await.unwrap();
        assert_eq!(gone.status(), 204);
    }
    server.post(&format!("/v1/sandboxes/{id}/pause"), "").send().await.unwrap();
    let (status, list) = server.json(server.get(&ports)).await;
    assert_eq!((status, list.as_array().unwrap().len(), &list[0]["port"]), (200, 1, &json!(5000)));
}

#[tokio::test]
async fn mistakes_are_400_and_others_sandboxes_404() {
    let server = Server::start().await;
    let id = server.sandbox();
    let ports = format!("/v1/sandboxes/{id}/ports");
    let long = format!(r#"{{"port":80,"label":"{}"}}"#, "x".repeat(65));
    for (body, code) in [
        ("", "port_required"),
        (r#"{"port":22}"#, "port_reserved"),
        (r#"{"port":0}"#, "invalid_port"),
        (r#"{"port":-1}"#, "invalid_port"),
        (r#"{"port":65536}"#, "invalid_port"),
        (r#"{"port":"80"}"#, "invalid_field"),
        (r#"{"port":80,"label":"a\nb"}"#, "invalid_label"),
        (long.as_str(), "invalid_label"),
    ] {
        let (status, answer) = server.json(server.post(&ports, body)).await;
        assert_eq!((status, answer["code"].as_str().unwrap()), (400, code), "{body}");
    }
    for bad in ["0", "65536", "x", "-1"] {
        assert_eq!(server.json(server.call(Method::DELETE, &format!("{ports}/{bad}"))).await.0, 400, "{bad}");
    }
    server.post(&ports, r#"{"port":80}"#).send().await.unwrap();
    let other = server.store.create("other", "x").await.unwrap();
    let foreign = |method: Method, path: &str, body: &'static str| {
        server.client.request(method, server.url(path)).bearer_auth(&other).body(body)
    };
    for (method, path, body) in [
        (Method::GET, ports.clone(), ""),
        (Method::POST, ports.clone(), r#"{"port":80}"#),
        (Method::DELETE, format!("{ports}/80"), ""),
    ] {
        let (status, answer) = server.json(foreign(method, &path, body)).await;
        assert_eq!((status, &answer["code"]), (404, &json!("sandbox_not_found")), "{path}");
    }
    assert_eq!(server.json(server.get(&ports)).await.1[0]["port"], 80, "a stranger changed it");
}

#[tokio::test]
async fn names_are_forgotten_with_their_sandbox() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.post(&format!("/v1/sandboxes/{id}/ports"), r#"{"port":80}"#).send().await.unwrap();
    let path = format!("/v1/sandboxes/{id}");
    assert_eq!(server.call(Method::DELETE, &path).send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.get(&format!("{path}/ports"))).await.0, 404);
}
