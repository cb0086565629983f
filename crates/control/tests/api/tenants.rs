//! Who may do what: the sweep over every route, tokens, workspaces, roles, and the audit log.

use coppice_api::Role;
use coppice_control::{Auth, MetricsAccess, NewToken, Of, RouteRule, Who, route_rules};
use reqwest::Method;
use serde_json::{Value, json};

use crate::common::Server;

const LINK: &str = "/v1/p/{token}";
const METHODS: [Method; 6] = [Method::GET, Method::PUT, Method::POST, Method::DELETE, Method::PATCH, Method::OPTIONS];

/// What the first tenant has.
struct Victim {
    sandbox: String,
    snapshot: String,
    prefix: String,
}

impl Victim {
    async fn of(server: &Server) -> Self {
        let sandbox = server.sandbox();
        let (_, snapshot) = server.json(server.post(&format!("/v1/sandboxes/{sandbox}/snapshots"), "")).await;
        Self { sandbox, snapshot: snapshot["id"].as_str().unwrap().into(), prefix: server.token[..12].into() }
    }

    /// The path of a route, about the victim's thing.
    fn path(&self, rule: &RouteRule) -> String {
        let first = match rule.access.of {
            Of::Nothing | Of::Link => "",
            Of::Sandbox => &self.sandbox,
            Of::Snapshot => &self.snapshot,
            Of::Template => "private",
            Of::Token => &self.prefix,
            Of::Workspace | Of::NewWorkspace => "default",
        };
        let mut path = String::new();
        let mut first = Some(first);
        for segment in rule.path.split('/').skip(1) {
            path.push('/');
            path.push_str(if segment.starts_with('{') { first.take().unwrap_or(&self.prefix) } else { segment });
        }
        // A path in the sandbox, where a route wants one.
        path + "?path=%2Fetc%2Fx"
    }
}

/// Everything of the first tenant that a request could change.
async fn state(server: &Server) -> Vec<Value> {
    let mut all = Vec::new();
    for path in ["/v1/sandboxes", "/v1/snapshots", "/v1/templates", "/v1/me/tokens", "/v1/workspaces"] {
        let (status, mut body) = server.json(server.get(path)).await;
        assert_eq!(status, 200, "{path}");
        for row in body.as_array_mut().unwrap() {
            row.as_object_mut().unwrap().remove("last_used_at");
        }
        all.push(body);
    }
    all.push(json!(server.fake.files.lock().unwrap().keys().collect::<Vec<_>>()));
    all
}

fn body_for(path: &str) -> &'static str {
    if path.contains("/exec") { r#"{"cmd":"true"}"# } else { "" }
}

#[tokio::test]
async fn every_route_hides_what_another_tenant_has() {
    let server = Server::start().await;
    let stranger = server.store.create("stranger", "x").await.unwrap();
    let victim = Victim::of(&server).await;
    let before = state(&server).await;
    let mut resources = 0;
    server.fake.calls();
    for rule in route_rules() {
        let path = victim.path(&rule);
        if matches!(rule.access.of, Of::Nothing | Of::Link) {
            continue;
        }
        resources += 1;
        for method in METHODS {
            let request = server.call_as(&stranger, method.clone(), &path).body(body_for(&path));
            let (status, answer) = server.json(request).await;
            let known = route_rules()
                .iter()
                .any(|other| other.path == rule.path && other.method.as_ref().is_none_or(|allowed| *allowed == method));
            assert_eq!(status, if known { 404 } else { 405 }, "{method} {path}: {answer}");
            assert!(!known || answer["code"].as_str().unwrap().ends_with("_not_found"), "{method} {path}: {answer}");
        }
    }
    assert!(resources > 25, "{resources}");
    let reached: Vec<_> = server.fake.calls().into_iter().filter(|call| !call.contains(" stranger")).collect();
    assert!(reached.is_empty(), "{reached:?}");
    assert_eq!(state(&server).await, before);
}

#[tokio::test]
async fn every_route_without_a_name_shows_the_callers_own_things_or_is_for_admins() {
    let server = Server::start().await;
    let stranger = server.store.create("stranger", "x").await.unwrap();
    let victim = Victim::of(&server).await;
    let before = state(&server).await;
    for rule in route_rules().into_iter().filter(|rule| rule.access.of == Of::Nothing) {
        let method = rule.method.clone().unwrap();
        let request = server.call_as(&stranger, method.clone(), &rule.path).header("X-Forwarded-For", "192.0.2.1");
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        let expected = match rule.access.who {
            Who::Admin | Who::MetricsReader => 403,
            _ if method == Method::POST => 201,
            _ => 200,
        };
        assert_eq!(status, expected, "{method} {}: {text}", rule.path);
        for secret in [&victim.sandbox, &victim.snapshot, &victim.prefix] {
            assert!(rule.access.who == Who::Anyone || !text.contains(secret.as_str()), "{method} {}", rule.path);
        }
    }
    let after = state(&server).await;
    assert_eq!(after[..4], before[..4]);
}

#[tokio::test]
async fn every_route_but_the_open_ones_is_401_without_a_token() {
    let server = Server::start().await;
    let victim = Victim::of(&server).await;
    let before = state(&server).await;
    server.fake.calls();
    let open: Vec<_> = route_rules().into_iter().filter(|rule| rule.access.who == Who::Anyone).collect();
    assert_eq!(
        open.iter().map(|rule| rule.path.as_str()).collect::<Vec<_>>(),
        // What a link opens is in `links`.
        ["/healthz", "/version", "/openapi.json", LINK, LINK, "/v1/p/{token}/", "/v1/p/{token}/{*rest}"]
    );
    for rule in route_rules().into_iter().filter(|rule| rule.access.who != Who::Anyone) {
        let path = victim.path(&rule);
        for token in [None, Some("pds_00000000000000000000000000000000"), Some("admin")] {
            let mut request = server.client.request(rule.method.clone().unwrap_or(Method::PUT), server.url(&path));
            request = request.header("X-Forwarded-For", "192.0.2.1").body(body_for(&path));
            if let Some(token) = token {
                request = request.bearer_auth(token);
            }
            assert_eq!(server.json(request).await.0, 401, "{path}");
        }
    }
    assert!(server.fake.calls().is_empty());
    assert_eq!(state(&server).await, before);
}

#[tokio::test]
async fn the_table_has_exactly_the_routes_of_the_document() {
    let document: Value = serde_json::from_str(&coppice_control::openapi_json()).unwrap();
    let mut documented = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        documented.extend(methods.as_object().unwrap().keys().map(|method| (path.clone(), method.to_uppercase())));
    }
    let mut listed: Vec<_> =
        route_rules().into_iter().filter_map(|rule| Some((rule.path, rule.method?.to_string()))).collect();
    documented.sort();
    listed.sort();
    assert_eq!(documented, listed);
    // A route about one thing names it.
    for rule in route_rules() {
        let named = rule.path.contains('{');
        assert_eq!(named, rule.access.of != Of::Nothing, "{}", rule.path);
        assert!(!rule.path.starts_with("/v1/sandboxes/") || rule.access.of == Of::Sandbox, "{}", rule.path);
        assert!(!rule.path.starts_with("/v1/workspaces") || rule.access.who != Who::Anyone, "{}", rule.path);
    }
}

#[tokio::test]
async fn tokens_are_made_listed_and_revoked() {
    let server = Server::start().await;
    let (status, made) = server.json(server.post("/v1/me/tokens", r#"{"label":"ci","expires_in_days":30}"#)).await;
    assert_eq!((status, &made["label"], &made["role"]), (201, &json!("ci"), &json!("member")));
    let token = made["token"].as_str().unwrap().to_owned();
    let prefix = made["prefix"].as_str().unwrap().to_owned();
    assert_eq!((token.len(), &token[..12]), (36, prefix.as_str()));
    assert!(made["expires_at"].as_str().unwrap() > made["created_at"].as_str().unwrap());
    let (status, me) = server.json(server.call_as(&token, Method::GET, "/v1/me")).await;
    assert_eq!((status, &me["user_id"], &me["current_org"]), (200, &json!(prefix), &json!("default")));

    let (_, list) = server.json(server.get("/v1/me/tokens")).await;
    assert!(!list.to_string().contains(&token) && !list.to_string().contains(&server.token));
    let row = list.as_array().unwrap().iter().find(|row| row["prefix"] == prefix.as_str()).unwrap();
    assert!(row["last_used_at"].is_string());

    let path = format!("/v1/me/tokens/{prefix}");
    assert_eq!(server.call(Method::DELETE, &path).send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.call_as(&token, Method::GET, "/v1/me")).await.0, 401);
    let (status, body) = server.json(server.call(Method::DELETE, &path)).await;
    assert_eq!((status, &body["code"]), (404, &json!("token_not_found")));

    let (_, named) = server.json(server.post("/v1/me/tokens", r#"{"name":"go"}"#)).await;
    assert_eq!(named["label"], "go");
    for body in [
        r#"{"expires_in_days":0}"#,
        r#"{"expires_in_days":-1}"#,
        r#"{"expires_in_days":1.5}"#,
        r#"{"expires_in_days":1,"expires_in_seconds":1}"#,
        r#"{"role":"root"}"#,
        r#"{"label":"a\nb"}"#,
    ] {
        assert_eq!(server.json(server.post("/v1/me/tokens", body)).await.0, 400, "{body}");
    }
}

#[tokio::test]
async fn a_token_ends_when_it_expires() {
    let server = Server::start().await;
    let (_, made) = server.json(server.post("/v1/me/tokens", r#"{"expires_in_seconds":1}"#)).await;
    let token = made["token"].as_str().unwrap();
    assert_eq!(server.json(server.call_as(token, Method::GET, "/v1/me")).await.0, 200);
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
    let (status, body) = server.json(server.call_as(token, Method::GET, "/v1/me")).await;
    assert_eq!((status, body["error"].as_str().unwrap().contains("expired")), (401, true));
}

#[tokio::test]
async fn a_member_rules_its_own_workspace_only() {
    let server = Server::start().await;
    let member = server.store.create("a", "x").await.unwrap();
    let (status, made) =
        server.json(server.call_as(&member, Method::POST, "/v1/me/tokens").body(r#"{"label":"mine"}"#)).await;
    assert_eq!((status, &made["workspace"], &made["role"]), (201, &json!("a"), &json!("member")));
    let (status, body) =
        server.json(server.call_as(&member, Method::POST, "/v1/me/tokens").body(r#"{"role":"admin"}"#)).await;
    assert_eq!((status, &body["code"]), (403, &json!("admin_only")));
    let (status, own) = server.json(server.call_as(&member, Method::GET, "/v1/workspaces/a")).await;
    assert_eq!((status, &own["name"], &own["tokens"]), (200, &json!("a"), &json!(2)));
    for (method, path, expected) in [
        (Method::GET, "/v1/workspaces", 403),
        (Method::GET, "/v1/audit", 403),
        (Method::PUT, "/v1/workspaces/a", 403),
        (Method::DELETE, "/v1/workspaces/a", 403),
        (Method::POST, "/v1/workspaces/a/tokens", 403),
        (Method::GET, "/v1/workspaces/default", 404),
        (Method::PUT, "/v1/workspaces/default", 404),
        (Method::POST, "/v1/workspaces/new/tokens", 404),
        (Method::DELETE, "/v1/templates/base?global=true", 403),
    ] {
        assert_eq!(server.json(server.call_as(&member, method, path)).await.0, expected, "{path}");
    }
    assert!(!server.fake.calls().iter().any(|call| call.starts_with("delete_global_template")));
    let admin = server.call(Method::DELETE, "/v1/templates/base?global=true").send().await.unwrap();
    assert_eq!(admin.status(), 204);
    assert!(server.fake.calls().contains(&"delete_global_template  base".to_owned()));
}

#[tokio::test]
async fn workspaces_come_with_their_first_token_and_go_when_empty() {
    let server = Server::start().await;
    let body = r#"{"label":"first"}"#;
    // A name has no power: the role is the token's.
    let (status, made) = server.json(server.post("/v1/workspaces/admin/tokens", body)).await;
    assert_eq!((status, &made["role"]), (201, &json!("member")));
    let token = made["token"].as_str().unwrap();
    assert_eq!(server.json(server.call_as(token, Method::GET, "/v1/workspaces")).await.0, 403);
    for bad in ["A", "-a", "a_b", "a.b", "a..b", "a%2Fb", &"x".repeat(64), "%C3%A9", "%20"] {
        let (status, body) = server.json(server.post(&format!("/v1/workspaces/{bad}/tokens"), body)).await;
        assert_eq!((status, &body["code"]), (400, &json!("invalid_workspace_name")), "{bad}");
    }
    let (_, all) = server.json(server.get("/v1/workspaces")).await;
    assert_eq!(all.as_array().unwrap().iter().map(|row| &row["name"]).collect::<Vec<_>>(), ["admin", "default"]);
    assert_eq!(server.json(server.get("/v1/workspaces/nope")).await.1["code"], "workspace_not_found");

    let (_, sandbox) = server.json(server.call_as(token, Method::POST, "/v1/sandboxes")).await;
    let (status, body) = server.json(server.call(Method::DELETE, "/v1/workspaces/admin")).await;
    assert_eq!((status, &body["code"]), (409, &json!("workspace_not_empty")));
    let path = format!("/v1/sandboxes/{}", sandbox["id"].as_str().unwrap());
    // Not even an admin reaches into another workspace.
    assert_eq!(server.json(server.call(Method::DELETE, &path)).await.0, 404);
    assert_eq!(server.call_as(token, Method::DELETE, &path).send().await.unwrap().status(), 204);
    assert_eq!(server.call(Method::DELETE, "/v1/workspaces/admin").send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.call_as(token, Method::GET, "/v1/me")).await.0, 401);
    let (status, body) = server.json(server.call(Method::DELETE, "/v1/workspaces/default")).await;
    assert_eq!((status, &body["code"]), (409, &json!("workspace_in_use")));
}

#[tokio::test]
async fn an_admin_manages_the_tokens_of_every_workspace() {
    let server = Server::start().await;
    let (_, made) = server.json(server.post("/v1/workspaces/a/tokens", r#"{"role":"admin"}"#)).await;
    let (token, prefix) = (made["token"].as_str().unwrap(), made["prefix"].as_str().unwrap());
    let (status, list) = server.json(server.call_as(token, Method::GET, "/v1/workspaces/a/tokens")).await;
    assert_eq!((status, &list[0]["prefix"]), (200, &json!(prefix)));
    let wrong = format!("/v1/workspaces/default/tokens/{prefix}");
    assert_eq!(server.json(server.call(Method::DELETE, &wrong)).await.0, 404);
    let right = format!("/v1/workspaces/a/tokens/{prefix}");
    assert_eq!(server.call(Method::DELETE, &right).send().await.unwrap().status(), 204);
    assert_eq!(server.json(server.call_as(token, Method::GET, "/v1/me")).await.0, 401);
    assert_eq!(server.json(server.call(Method::DELETE, "/v1/workspaces/a/tokens/%ff")).await.0, 404);
}

#[tokio::test]
async fn metrics_are_for_loopback_and_admins() {
    let server = Server::with(|config| config.metrics = MetricsAccess::Token).await;
    let member = server.store.create("a", "x").await.unwrap();
    assert_eq!(server.json(server.call_as(&member, Method::GET, "/metrics")).await.0, 403);
    assert_eq!(server.json(server.get("/metrics")).await.0, 200);
}

#[tokio::test]
async fn without_auth_there_are_no_tokens_and_no_workspaces() {
    let off = Server::with(|config| config.auth = Auth::Off).await;
    for path in ["/v1/me/tokens", "/v1/workspaces", "/v1/workspaces/default", "/v1/audit"] {
        let (status, body) = off.json(off.client.get(off.url(path))).await;
        assert_eq!((status, &body["code"]), (409, &json!("auth_is_off")), "{path}");
    }
    assert_eq!(off.json(off.client.post(off.url("/v1/sandboxes"))).await.0, 201);
}

#[tokio::test]
async fn the_audit_log_says_who_changed_what_and_how_it_ended() {
    let server = Server::start().await;
    let new = NewToken { label: "x".into(), role: Role::Member, lifetime: None };
    let member = server.store.create_token("a", &new).await.unwrap();
    let request = server.call_as(&member.token, Method::POST, "/v1/sandboxes").header("x-request-id", "r-1");
    let (_, made) = server.json(request).await;
    let id = made["id"].as_str().unwrap();
    let path = format!("/v1/sandboxes/{id}");
    server.json(server.call_as(&member.token, Method::GET, &path)).await;
    server.json(server.call(Method::DELETE, &path)).await;
    server.fake.fail("exec", coppice_api::ErrorClass::Internal, "panic");
    let exec = server.call_as(&member.token, Method::POST, &format!("{path}/exec")).body(r#"{"cmd":"secret words"}"#);
    server.json(exec).await;
    server.json(server.client.post(server.url("/v1/sandboxes"))).await;
    let (_, token) = server.json(server.post("/v1/me/tokens", r#"{"label":"t"}"#)).await;

    let (status, log) = server.json(server.get("/v1/audit")).await;
    assert_eq!(status, 200);
    let rows: Vec<_> = log
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let text = |name: &str| row[name].as_str().unwrap().to_owned();
            (text("workspace"), text("method"), text("route"), text("resource"), row["status"].as_u64().unwrap())
        })
        .collect();
    let row = |workspace: &str, method: &str, route: &str, resource: &str, status| {
        (workspace.to_owned(), method.to_owned(), route.to_owned(), resource.to_owned(), status)
    };
    let expected = [
        row("default", "POST", "/v1/me/tokens", token["prefix"].as_str().unwrap(), 201),
        row("a", "POST", "/v1/sandboxes/{id}/exec", id, 500),
        row("default", "DELETE", "/v1/sandboxes/{id}", id, 404),
        row("a", "POST", "/v1/sandboxes", id, 201),
    ];
    assert_eq!(rows, expected);
    assert_eq!((&log[3]["request_id"], &log[3]["token"]), (&json!("r-1"), &json!(member.info.prefix)));
    let text = log.to_string();
    assert!(!text.contains("secret words") && !text.contains(&member.token));
    assert!(!text.contains(token["token"].as_str().unwrap()));

    let (_, page) = server.json(server.get(&format!("/v1/audit?limit=1&before={}", log[1]["id"]))).await;
    assert_eq!(page, json!([log[2]]));
    let (_, of_a) = server.json(server.get("/v1/audit?workspace=a")).await;
    assert_eq!(of_a.as_array().unwrap().len(), 2);
    for bad in ["limit=0", "limit=1001", "limit=x", "before=x"] {
        assert_eq!(server.json(server.get(&format!("/v1/audit?{bad}"))).await.0, 400, "{bad}");
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_is_in_the_audit_log_too() {
    let server = Server::start().await;
    let id = server.sandbox();
    server.fake.script("hang", [crate::common::Act::Hang]);
    let exec = server.post(&format!("/v1/sandboxes/{id}/exec"), r#"{"cmd":"hang"}"#);
    exec.timeout(std::time::Duration::from_millis(200)).send().await.unwrap_err();
    server.fake.quiet().await;
    let (_, log) = server.json(server.get("/v1/audit")).await;
    assert_eq!((&log[0]["status"], &log[0]["resource"]), (&json!(499), &json!(id)));
}
