//! `token`, `workspace` and `audit` against the small cloud.

use serde_json::{Value, json};

use crate::fake::{Cloud, err, out};

fn parsed(output: &std::process::Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test]
async fn a_token_is_printed_alone_so_that_a_script_can_take_it() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["token", "create", "ci", "--workspace", "team-a", "--expires", "30d"]).await;
    assert_eq!((done.status.code(), out(&done).as_str()), (Some(0), "pds_0f8fad5bd9cb469fa16570867728950e\n"));
    assert!(err(&done).contains("a member of workspace team-a; it ends in 30 d"), "{}", err(&done));
    let body = cloud.body("POST /v1/workspaces/team-a/tokens");
    assert_eq!(body, json!({"label": "ci", "role": "member", "expires_in_seconds": 2_592_000}));
    let done = cloud.run(&["--json", "token", "create", "ops", "--role", "admin"]).await;
    assert_eq!((parsed(&done)["label"].as_str(), err(&done).as_str()), (Some("ops"), ""));
    assert_eq!(cloud.body("POST /v1/me/tokens"), json!({"label": "ops", "role": "admin"}));
}

#[tokio::test]
async fn tokens_are_listed_and_revoked_by_their_prefixes() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["token", "list"]).await;
    assert!(out(&done).contains("pds_0f8fad5b") && out(&done).contains("expired"), "{}", out(&done));
    // A whole token does not travel in a URL.
    let done = cloud.run(&["token", "revoke", "pds_0f8fad5bd9cb469fa16570867728950e"]).await;
    assert_eq!((done.status.code(), out(&done).as_str()), (Some(0), "deleted pds_0f8fad5b\n"), "{}", err(&done));
    let done = cloud.run(&["token", "revoke", "pds_nope"]).await;
    assert_eq!(done.status.code(), Some(1));
}

#[tokio::test]
async fn a_quota_changes_only_what_is_given() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["workspace", "set-quota", "a", "--memory-mb", "4096", "--fan-out", "unlimited"]).await;
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    assert!(out(&done).contains("9 of 9") && out(&done).contains("512 of 4096"), "{}", out(&done));
    assert_eq!(cloud.body("PUT /v1/workspaces/a"), json!({"sandboxes": 9, "memory_mb": 4096}));
    let done = cloud.run(&["--json", "workspace", "show"]).await;
    assert_eq!(parsed(&done)["name"], "a");
    let done = cloud.run(&["workspace", "list"]).await;
    assert!(out(&done).starts_with("WORKSPACE  SANDBOXES"), "{}", out(&done));
    let done = cloud.run(&["workspace", "delete", "full"]).await;
    assert_eq!((done.status.code(), err(&done).as_str()), (Some(1), "error: not empty\n"));
    let done = cloud.run(&["workspace", "delete", "b"]).await;
    assert_eq!(out(&done), "deleted b\n");
}

#[tokio::test]
async fn the_audit_log_is_a_table() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["audit", "-n", "5", "--workspace", "a", "--before", "9"]).await;
    assert!(out(&done).contains("POST /v1/sandboxes"), "{}", out(&done));
    assert!(cloud.lines().contains(&"GET /v1/audit?workspace=a&before=9&limit=5".to_owned()), "{:?}", cloud.lines());
    let done = cloud.run(&["--json", "audit"]).await;
    assert_eq!(parsed(&done)[0]["id"], 7);
}
