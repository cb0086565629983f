//! Routes, auth, errors, and what requests may say.

use coppice_api::ErrorClass;
use coppice_control::{Auth, MetricsAccess, openapi_json};
use reqwest::Method;
use serde_json::{Value, json};

use crate::common::Server;

const UNKNOWN: &str = "00000000-0000-0000-0000-000000000000";

#[tokio::test]
async fn open_routes_need_no_token() {
    let server = Server::start().await;
    for path in ["/healthz", "/version", "/openapi.json", "/metrics"] {
        let response = server.client.get(server.url(path)).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        assert!(response.headers().contains_key("x-request-id"));
    }
    let (_, version) = server.json(server.client.get(server.url("/version"))).await;
    assert_eq!(version["engine"], "fake 1");
}

#[tokio::test]
async fn everything_under_v1_needs_a_token() {
    let server = Server::start().await;
    let id = server.sandbox();
    for (method, path) in [
        (Method::GET, "/v1/me".to_owned()),
        (Method::GET, "/v1/no-such-route".to_owned()),
        (Method::POST, "/v1/sandboxes".to_owned()),
        (Method::DELETE, format!("/v1/sandboxes/{id}")),
        (Method::POST, format!("/v1/sandboxes/{id}/exec")),
    ] {
        let good = server.token.clone();
        let other = format!("pds_{}", "0".repeat(32));
        for header in [
            None,
            Some("Bearer bad".to_owned()),
            Some(format!("Basic {good}")),
            Some(good.clone()),
            Some(format!("Bearer {good}0")),
            Some(format!("Bearer {other}")),
            Some("Bearer ".to_owned()),
        ] {
            let mut request = server.client.request(method.clone(), server.url(&path));
            if let Some(header) = &header {
                request = request.header("Authorization", header);
            }
            let (status, body) = server.json(request).await;
            assert_eq!((status, &body["code"]), (401, &json!("unauthorized")), "{path} {header:?}");
            assert!(!body.to_string().contains(&good));
        }
    }
    assert!(server.fake.calls().is_empty());
    let lower = server.client.get(server.url("/v1/me")).header("authorization", format!("bearer {}", server.token));
    let (status, me) = server.json(lower).await;
    assert_eq!(status, 200);
    assert_eq!(me["user_id"], server.token[..12]);
    assert_eq!(me["current_org"], "default");
    assert_eq!(me["auth_method"], "token");
}

#[tokio::test]
async fn auth_can_be_off_and_metrics_closed() {
    let off = Server::with(|config| config.auth = Auth::Off).await;
    let (status, me) = off.json(off.client.get(off.url("/v1/me"))).await;
    assert_eq!((status, &me["auth_method"]), (200, &json!("none")));

    let server = Server::with(|config| config.metrics = MetricsAccess::Token).await;
    assert_eq!(server.json(server.client.get(server.url("/metrics"))).await.0, 401);
    assert_eq!(server.json(server.get("/metrics")).await.0, 200);
    let server = Server::start().await;
    let forwarded = server.client.get(server.url("/metrics")).header("X-Forwarded-For", "127.0.0.1");
    assert_eq!(server.json(forwarded).await.0, 401);
}

#[tokio::test]
async fn a_token_sees_its_own_workspace_only() {
    let server = Server::start().await;
    let token = server.store.create("other", "x").await.unwrap();
    let id = server.sandbox();
    let (status, body) = server.json(server.get(&format!("/v1/sandboxes/{id}"))).await;
    assert_eq!((status, &body["id"]), (200, &json!(id)));
    let fs = "fs?path=%2Fx";
    for (method, tail) in [
        (Method::GET, ""),
        (Method::DELETE, ""),
        (Method::POST, "exec"),
        (Method::POST, "exec/stream"),
        (Method::GET, fs),
        (Method::PUT, fs),
        (Method::DELETE, fs),
        (Method::GET, "fs/dir?path=%2F"),
        (Method::GET, "fs/stat?path=%2F"),
        (Method::GET, "logs"),
        (Method::GET, "logs?follow=true"),
        (Method::GET, "lifecycle"),
        (Method::PATCH, "lifecycle"),
        (Method::GET, "network"),
        (Method::PATCH, "network"),
        (Method::POST, "snapshots"),
        (Method::POST, "fork"),
        (Method::POST, "fork-tree"),
        (Method::POST, "promote"),
        (Method::POST, "pause"),
        (Method::POST, "resume"),
        (Method::POST, "hibernate"),
        (Method::POST, "wake"),
    ] {
        let path = format!("/v1/sandboxes/{id}/{tail}");
        let request = server.client.request(method, server.url(path.trim_end_matches('/'))).bearer_auth(&token);
        let request = if tail.starts_with("exec") { request.body(r#"{"cmd":"x"}"#) } else { request };
        let (status, body) = server.json(request).await;
        assert_eq!((status, &body["code"]), (404, &json!("sandbox_not_found")), "{tail}");
    }
    let list = server.client.get(server.url("/v1/sandboxes")).bearer_auth(&token);
    assert_eq!(list.send().await.unwrap().text().await.unwrap(), "[]");
}

#[tokio::test]
async fn unknown_routes_and_methods_are_json() {
    let server = Server::start().await;
    let id = server.sandbox();
    for path in ["/v1", "/v1/", "/v1/volumes", "/v1/sandboxes/", &format!("/v1/sandboxes/{id}/"), "/", "/nope"] {
        let (status, body) = server.json(server.get(path)).await;
        assert_eq!((status, &body["code"]), (404, &json!("route_not_found")), "{path}");
    }
    for path in ["stop", "repl/sessions"] {
        let (status, body) = server.json(server.post(&format!("/v1/sandboxes/{id}/{path}"), "")).await;
        assert_eq!((status, &body["code"]), (404, &json!("route_not_found")), "{path}");
    }
    for (method, path) in [
        (Method::PUT, "/v1/sandboxes".to_owned()),
        (Method::GET, format!("/v1/sandboxes/{id}/exec")),
        (Method::POST, "/v1/me".to_owned()),
        (Method::POST, "/healthz".to_owned()),
    ] {
        let response = server.call(method, &path).send().await.unwrap();
        assert!(response.headers().contains_key("allow"), "{path}");
        assert_eq!(response.status(), 405);
        let body: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
        assert_eq!(body["code"], "method_not_allowed");
    }
}

#[tokio::test]
async fn ids_that_are_none_do_not_exist() {
    let server = Server::start().await;
    for id in ["nope", "%ff", "a%2Fb", "0f8fad5bd9cb469fa16570867728950e", UNKNOWN, "%F0%9F%A6%80"] {
        let (status, _) = server.json(server.get(&format!("/v1/sandboxes/{id}"))).await;
        assert_eq!(status, 404, "{id}");
        let (status, _) = server.json(server.get(&format!("/v1/snapshots/{id}"))).await;
        assert_eq!(status, 404, "{id}");
    }
    for name in ["x", "..%2Fx", "a%20b"] {
        let (status, body) = server.json(server.get(&format!("/v1/templates/{name}"))).await;
        assert_eq!((status, &body["code"]), (404, &json!("template_not_found")), "{name}");
    }
    assert!(server.fake.calls().iter().all(|call| call.contains(UNKNOWN) || call == "template default x"));
    let id = server.sandbox();
    assert_eq!(server.json(server.get(&format!("/v1/sandboxes/{}", id.to_uppercase()))).await.0, 200);
}

#[tokio::test]
async fn every_class_has_its_status() {
    let server = Server::start().await;
    let id = server.sandbox();
    for (class, status, retry) in [
        (ErrorClass::Caller, 400, None),
        (ErrorClass::Unauthorized, 401, None),
        (ErrorClass::Forbidden, 403, None),
        (ErrorClass::NotFound, 404, None),
        (ErrorClass::Conflict, 409, None),
        (ErrorClass::TooLarge, 413, None),
        (ErrorClass::Capacity, 507, None),
        (ErrorClass::Transient, 503, Some("5")),
        (ErrorClass::Unavailable, 503, None),
        (ErrorClass::Quota, 429, None),
        (ErrorClass::Timeout, 504, None),
        (ErrorClass::Internal, 500, None),
    ] {
        server.fake.fail("fork_tree", class, "it failed: caf\u{e9} \u{2028}");
        let response = server.post(&format!("/v1/sandboxes/{id}/fork-tree"), "").send().await.unwrap();
        assert_eq!(response.status(), status);
        let header = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(header.as_deref(), retry, "{class:?}");
        let text = response.text().await.unwrap();
        assert!(text.is_ascii());
        let body: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(body["code"], "scripted");
        assert!(body["error"].as_str().unwrap().ends_with("it failed: caf\u{e9} \u{2028}"));
        assert_eq!(body["hint"].is_string(), class == ErrorClass::Conflict);
        if class == ErrorClass::Timeout {
            assert!(body["error"].as_str().unwrap().contains("timeout"));
        }
    }
}

#[tokio::test]
async fn a_panic_is_a_500_and_the_server_goes_on() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.fail("get", ErrorClass::Internal, "panic");
    let (status, body) = server.json(server.get(&format!("/v1/sandboxes/{id}"))).await;
    assert_eq!((status, &body["code"]), (500, &json!("internal")));
    assert_eq!(server.json(server.get("/v1/sandboxes")).await.0, 200);
}

#[tokio::test]
async fn words_that_make_clients_repeat_a_command_are_not_said() {
    let server = Server::start().await;
    let id = server.sandbox();
    let exec = format!("/v1/sandboxes/{id}/exec");
    let text = "dial: Connect: Connection Refused, No route to host, read: i/o timeout";
    for class in [ErrorClass::Internal, ErrorClass::Timeout, ErrorClass::Capacity] {
        server.fake.fail("exec", class, text);
        let (_, body) = server.json(server.post(&exec, r#"{"cmd":"x"}"#)).await;
        let said = body["error"].as_str().unwrap().to_lowercase();
        for word in ["connect: connection refused", "no route to host", "i/o timeout"] {
            assert!(!said.contains(word), "{said}");
        }
    }
    server.fake.fail("exec", ErrorClass::Transient, text);
    let (status, body) = server.json(server.post(&exec, r#"{"cmd":"x"}"#)).await;
    assert_eq!((status, &body["error"]), (503, &json!(text)), "nothing was started: the client may try again");
}

#[tokio::test]
async fn bodies_may_be_empty_on_every_post() {
    let server = Server::start().await;
    let snapshot = server.fake.add_sandbox("default");
    for tail in ["", "fork", "fork-tree", "promote", "pause", "resume", "hibernate", "wake", "snapshots"] {
        let path =
            if tail.is_empty() { "/v1/sandboxes".to_owned() } else { format!("/v1/sandboxes/{snapshot}/{tail}") };
        for (more, body) in [
            ("Content-Length: 0\r\n", ""),
            ("", ""),
            ("Content-Length: 0\r\nContent-Type: text/plain;charset=UTF-8\r\n", ""),
            ("Content-Length: 0\r\nContent-Type: application/json\r\n", ""),
            ("Content-Length: 2\r\nContent-Type: application/x-www-form-urlencoded\r\n", "{}"),
        ] {
            let mut wire = server.wire().await;
            wire.send(server.head("POST", &path, more) + body).await;
            let raw = wire.response().await;
            assert!(matches!(raw.status, 200 | 201 | 204), "{path} {more:?}: {raw:?}");
        }
    }
    for path in ["exec", "exec/stream"] {
        let (status, body) = server.json(server.post(&format!("/v1/sandboxes/{snapshot}/{path}"), "")).await;
        assert_eq!((status, &body["error"]), (400, &json!("cmd required")));
    }
}

#[tokio::test]
async fn mistakes_in_bodies_are_400_with_a_sentence() {
    let server = Server::start().await;
    let id = server.sandbox();
    let create = "/v1/sandboxes".to_owned();
    let exec = format!("/v1/sandboxes/{id}/exec");
    let fork = format!("/v1/sandboxes/{id}/fork");
    let tree = format!("/v1/sandboxes/{id}/fork-tree");
    let big = format!(r#"{{"metadata":{{"a":"{}"}}}}"#, "x".repeat(17 << 10));
    let long = format!(r#"{{"cmd":"{}"}}"#, "x".repeat(128 << 10));
    for (path, body, code) in [
        (&create, "{", "invalid_json"),
        (&create, "[]", "invalid_json"),
        (&create, "\u{fffd}", "invalid_json"),
        (&create, r#"{"ttl_seconds":0}"#, "invalid_ttl"),
        (&create, r#"{"ttl_seconds":-1}"#, "invalid_ttl"),
        (&create, r#"{"ttl_seconds":99999999999}"#, "invalid_ttl"),
        (&create, r#"{"ttl_seconds":"5"}"#, "invalid_field"),
        (&create, r#"{"metadata":{"a":1}}"#, "invalid_field"),
        (&create, r#"{"network":{"egress":"all"}}"#, "invalid_field"),
        (&create, r#"{"network":{"egress":{"allow":["a.b",1]}}}"#, "invalid_field"),
        (&create, r#"{"network":"open"}"#, "invalid_field"),
        (&create, r#"{"metadata":{"":"x"}}"#, "invalid_metadata"),
        (&create, &big, "metadata_too_large"),
        (&create, r#"{"volumes":[{"name":"v"}]}"#, "volumes_unsupported"),
        (&create, r#"{"template":"../x"}"#, "unknown_template"),
        (&create, r#"{"template":"no-such"}"#, "unknown_template"),
        (&exec, r#"{"cmd":""}"#, "cmd_required"),
        (&exec, r#"{"cmd":null}"#, "cmd_required"),
        (&exec, r#"{"cmd":["a"]}"#, "invalid_field"),
        (&exec, r#"{"cmd":"a\u0000b"}"#, "nul_character"),
        (&exec, &long, "cmd_too_long"),
        (&exec, r#"{"cmd":"x","timeout_seconds":0}"#, "invalid_timeout"),
        (&exec, r#"{"cmd":"x","timeout_seconds":1e12}"#, "invalid_timeout"),
        (&exec, r#"{"cmd":"x","cwd":"tmp"}"#, "invalid_cwd"),
        (&exec, r#"{"cmd":"x","env":{"A=B":"x"}}"#, "invalid_env"),
        (&fork, r#"{"count":0}"#, "invalid_count"),
        (&fork, r#"{"count":17}"#, "invalid_count"),
        (&fork, r#"{"mode":"warm","count":2}"#, "invalid_count"),
        (&fork, r#"{"mode":"warm","count":0}"#, "invalid_count"),
        (&fork, r#"{"mode":"hot"}"#, "invalid_field"),
        (&tree, r#"{"count":-1}"#, "invalid_count"),
        (&tree, r#"{"count":17}"#, "invalid_count"),
        (&tree, r#"{"count":1.5}"#, "invalid_field"),
        (&tree, r#"{"count":"2"}"#, "invalid_field"),
    ] {
        let (status, answer) = server.json(server.post(path, body)).await;
        let shown: String = body.chars().take(60).collect();
        assert_eq!((status, answer["code"].as_str().unwrap()), (400, code), "{shown}: {answer}");
    }
    let patch = server.call(Method::PATCH, &format!("/v1/sandboxes/{id}/lifecycle")).body(r#"{"ttl_seconds":-1}"#);
    assert_eq!(server.json(patch).await.0, 400);
    let looked = |call: &&String| call.contains("no-such") || call.starts_with("get ");
    let made = server.fake.calls().iter().filter(|call| !looked(call)).count();
    assert_eq!(made, 0, "nothing reached the host");
}

#[tokio::test]
async fn a_sandbox_from_creation_to_its_end() {
    let server = Server::start().await;
    let body = r#"{"template":"base","metadata":{"a":"b"},"ttl_seconds":600,"persistent":true,"volumes":[],"cpu":8}"#;
    let (status, made) = server.json(server.post("/v1/sandboxes", body)).await;
    assert_eq!((status, &made["metadata"]["a"], &made["persistent"]), (201, &json!("b"), &json!(true)));
    let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    assert_eq!(server.post(&format!("{path}/pause"), "").send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.get(&path)).await.1["status"], "paused");
    assert_eq!(server.post(&format!("{path}/resume"), "").send().await.unwrap().status(), 204);
    for (change, status) in [("hibernate", "hibernated"), ("wake", "running"), ("wake", "running")] {
        let reply = server.json(server.post(&format!("{path}/{change}"), "")).await;
        assert_eq!(reply, (200, json!({ "status": status })));
        assert_eq!(server.json(server.get(&path)).await.1["status"], status);
    }
    let patch =
        server.call(Method::PATCH, &format!("{path}/lifecycle")).body(r#"{"ttl_seconds":60,"persistent":null}"#);
    assert_eq!(
        server.json(patch).await,
        (200, json!({"ttl_seconds":60,"on_ttl":"delete","persistent":true,"idle_seconds":0}))
    );
    let patch = server.call(Method::PATCH, &format!("{path}/lifecycle")).body(r#"{"on_ttl":"hibernate"}"#);
    assert_eq!(server.json(patch).await.1["on_ttl"], "hibernate");
    assert_eq!(server.json(server.get(&path)).await.1["on_ttl"], "hibernate");
    let patch = server.call(Method::PATCH, &format!("{path}/lifecycle")).body(r#"{"on_ttl":"archive"}"#);
    let (status, refused) = server.json(patch).await;
    assert!(status == 400 && refused["error"].as_str().unwrap().contains("`hibernate`"), "{refused}");
    for (fork, body, on_ttl) in [
        ("fork-tree", "", "hibernate"),
        ("fork-tree", r#"{"on_ttl":"delete"}"#, "delete"),
        ("fork", r#"{"on_ttl":"delete"}"#, "delete"),
    ] {
        let (status, made) = server.json(server.post(&format!("{path}/{fork}"), body)).await;
        assert_eq!((status, made["children"][0]["on_ttl"].as_str()), (201, Some(on_ttl)), "{made}");
    }
    assert_eq!(server.json(server.get(&format!("{path}/lifecycle"))).await.1["ttl_seconds"], 60);
    let gone = server.call(Method::DELETE, &path).send().await.unwrap();
    assert_eq!((gone.status().as_u16(), gone.bytes().await.unwrap().len()), (204, 0));
    assert_eq!(server.json(server.call(Method::DELETE, &path)).await.0, 404);
}

#[tokio::test]
async fn a_network_policy_is_echoed_and_changed() {
    let server = Server::start().await;
    let allow = json!({"egress": {"allow": ["203.0.113.0/24", "*.example.org:443"]}});
    let body = json!({"template": "base", "network": allow}).to_string();
    let (status, made) = server.json(server.post("/v1/sandboxes", &body)).await;
    assert_eq!((status, &made["network"]), (201, &allow));
    let path = format!("/v1/sandboxes/{}/network", made["id"].as_str().unwrap());
    assert_eq!(server.json(server.get(&path)).await, (200, allow.clone()));
    for (change, now) in [
        ("", allow.clone()),
        (r#"{"egress":null}"#, allow),
        (r#"{"egress":"none"}"#, json!({"egress": "none"})),
        (r#"{"egress":{"allow":[]}}"#, json!({"egress": {"allow": []}})),
        (r#"{"egress":"open"}"#, json!({"egress": "open"})),
    ] {
        let patch = server.call(Method::PATCH, &path).body(change);
        assert_eq!(server.json(patch).await, (200, now.clone()), "{change}");
        assert_eq!(server.json(server.get(&path)).await.1, now);
    }
    let wrong = server.call(Method::PATCH, &path).body(r#"{"egress":"all"}"#);
    assert_eq!(server.json(wrong).await.1["code"], "invalid_field");
    for network in ["{}", r#"{"egress":null}"#, "null"] {
        let (status, made) = server.json(server.post("/v1/sandboxes", &format!(r#"{{"network":{network}}}"#))).await;
        assert_eq!((status, &made["network"]["egress"]), (201, &json!("open")), "{network}");
    }
}

#[tokio::test]
async fn snapshots_and_what_comes_of_them() {
    let server = Server::start().await;
    let id = server.sandbox();
    let (status, first) = server.json(server.post(&format!("/v1/sandboxes/{id}/snapshots"), "")).await;
    assert_eq!((status, &first["id"]), (201, &first["snapshot_id"]));
    let other = server.sandbox();
    let (_, second) = server.json(server.post(&format!("/v1/sandboxes/{other}/snapshots"), "")).await;
    let (_, all) = server.json(server.get("/v1/snapshots")).await;
    assert_eq!((all.as_array().unwrap().len(), &all[0]["id"]), (2, &second["id"]));
    let (_, some) = server.json(server.get(&format!("/v1/snapshots?sandbox_id={id}"))).await;
    assert_eq!((some.as_array().unwrap().len(), &some[0]["id"]), (1, &first["id"]));
    assert_eq!(server.json(server.get("/v1/snapshots?sandbox_id=nope")).await, (200, json!([])));

    let snapshot = first["id"].as_str().unwrap();
    let body = format!(r#"{{"template":"code-interpreter","from_snapshot":"{snapshot}"}}"#);
    let (status, made) = server.json(server.post("/v1/sandboxes", &body)).await;
    assert_eq!((status, &made["from_snapshot"]), (201, &first["id"]));
    assert!(server.fake.calls().iter().any(|call| call.starts_with("create") && !call.contains("code-interpreter")));
    let (status, body) = server.json(server.post("/v1/sandboxes", r#"{"from_snapshot":"nope"}"#)).await;
    assert_eq!((status, &body["code"]), (404, &json!("snapshot_not_found")));

    let path = format!("/v1/snapshots/{snapshot}");
    assert_eq!(server.json(server.get(&path)).await.1["sandbox_id"], id.as_str());
    assert_eq!(server.call(Method::DELETE, &path).send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.get(&path)).await.0, 404);
}

#[tokio::test]
async fn forks_and_promotion() {
    let server = Server::start().await;
    let id = server.sandbox();
    let (status, fork) = server.json(server.post(&format!("/v1/sandboxes/{id}/fork"), r#"{"mode":"cold"}"#)).await;
    assert_eq!((status, fork["children"].as_array().unwrap().len(), &fork["mode"]), (201, 1, &json!("disk")));
    let body = r#"{"count":3,"metadata":{"k":"v"}}"#;
    let (status, tree) = server.json(server.post(&format!("/v1/sandboxes/{id}/fork-tree"), body)).await;
    assert_eq!((status, tree["children"].as_array().unwrap().len()), (201, 3));
    assert_eq!(tree["children"][2]["metadata"]["fork_index"], "2");
    let winner = tree["children"][1]["id"].as_str().unwrap();
    let promote = format!("/v1/sandboxes/{winner}/promote");
    let (status, _) = server.json(server.post(&promote, r#"{"cleanup_siblings":true,"tree_id":"other"}"#)).await;
    assert_eq!(status, 400);
    let (_, reply) = server.json(server.post(&promote, r#"{"cleanup_siblings":true,"tree_id":null}"#)).await;
    assert_eq!((reply["deleted"].as_array().unwrap().len(), &reply["failures"]), (2, &json!({})));
    let (_, again) = server.json(server.post(&promote, r#"{"cleanup_siblings":true}"#)).await;
    assert_eq!((&again["deleted"], &again["tree_id"]), (&json!([]), &tree["tree_id"]));
}

#[tokio::test]
async fn a_fork_without_children_is_no_success() {
    let server = Server::start().await;
    let (_, made) = server.json(server.post("/v1/sandboxes", r#"{"template":"barren"}"#)).await;
    let path = format!("/v1/sandboxes/{}/fork-tree", made["id"].as_str().unwrap());
    let (status, body) = server.json(server.post(&path, "")).await;
    assert_eq!((status, &body["code"]), (500, &json!("fork_without_children")));
}

#[tokio::test]
async fn templates() {
    let server = Server::start().await;
    assert_eq!(server.json(server.get("/v1/templates")).await.1[0]["name"], "base");
    assert_eq!(server.json(server.get("/v1/templates/base")).await.1["memory_mb"], 512);
    let (status, _) = server.json(server.call(Method::DELETE, "/v1/templates/base")).await;
    assert_eq!(status, 403);
}

#[tokio::test]
async fn request_ids_are_echoed_or_made() {
    let server = Server::start().await;
    let mine = server.get("/v1/me").header("x-request-id", "abc-1").send().await.unwrap();
    assert_eq!(mine.headers()["x-request-id"], "abc-1");
    let silly = server.get("/v1/me").header("x-request-id", "x".repeat(500)).send().await.unwrap();
    assert_eq!(silly.headers()["x-request-id"].len(), 36);
    let refused = server.client.get(server.url("/v1/me")).send().await.unwrap();
    assert!(refused.headers().contains_key("x-request-id"));
}

#[tokio::test]
async fn metrics_count_requests_by_route() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.get(&format!("/v1/sandboxes/{id}/lifecycle")).send().await.unwrap();
    server.get("/v1/made-up-by-a-scanner").send().await.unwrap();
    let text = server.get("/metrics").send().await.unwrap().text().await.unwrap();
    let route = r#"coppice_http_requests_total{method="GET",path="/v1/sandboxes/{id}/lifecycle",status="200"}"#;
    assert!(text.contains(route), "{text}");
    assert!(
        text.contains(
            r#"coppice_http_request_duration_seconds_bucket{method="GET",path="/v1/sandboxes/{id}/lifecycle""#
        )
    );
    assert!(text.contains("coppice_http_requests_in_flight "));
    assert!(text.contains(r#"path="unmatched""#) && !text.contains("scanner") && !text.contains(&id));
}

#[tokio::test]
async fn the_document_is_the_committed_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == openapi_json(),
        "docs/openapi.json is not what the handlers say. Regenerate it:\n  \
         cargo test -p coppice-control --test api -- --ignored regenerate"
    );
}

#[test]
#[ignore = "writes docs/openapi.json"]
fn regenerate() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    std::fs::create_dir_all(std::path::Path::new(path).parent().unwrap()).unwrap();
    std::fs::write(path, openapi_json()).unwrap();
}

#[test]
fn the_document_describes_every_operation() {
    let document: Value = serde_json::from_str(&openapi_json()).unwrap();
    assert!(document["openapi"].as_str().unwrap().starts_with("3."));
    assert_eq!(document["components"]["securitySchemes"]["token"]["scheme"], "bearer");
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 24);
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            assert!(operation["summary"].as_str().is_some_and(|text| text.len() > 8), "{method} {path}");
            let responses = operation["responses"].as_object().unwrap();
            let v1 = path.starts_with("/v1/") && !path.starts_with("/v1/p/");
            assert!(responses.keys().any(|status| status.starts_with('2')), "{method} {path}");
            assert!(!v1 || responses.contains_key("401"), "{method} {path}");
            assert_eq!(v1, operation.get("security").is_none(), "{method} {path}");
        }
    }
}
