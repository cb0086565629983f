//! What is said of a wrong command line and of a server that is not there.

use serde_json::Value;

use crate::fake::{command, err, out};

async fn run(args: &[&str]) -> std::process::Output {
    command(args).output().await.unwrap()
}

#[tokio::test]
async fn wrong_command_lines_end_with_two() {
    for args in [
        &["nonsense"][..],
        &["sandbox"],
        &["sandbox", "exec", "x"],
        &["fork-tree", "x", "-n", "17"],
        &["fork", "x", "--warm", "--mode", "disk"],
        &["explore", "x"],
        &["explore", "x", "--try", "no-command"],
        &["sandbox", "cp", "a", "b"],
        &["token", "create"],
        &["token", "create", "x", "--expires", "30"],
        &["token", "create", "x", "--workspace", "A_b"],
        &["workspace", "set-quota", "a"],
        &["workspace", "set-quota", "a", "--sandboxes", "-1"],
        &["workspace", "show", "../etc"],
        &["sandbox", "cp", "x:relative", "b"],
    ] {
        let done = run(args).await;
        assert_eq!(done.status.code(), Some(2), "{args:?}: {}", err(&done));
        assert!(!done.stderr.is_empty() && done.stdout.is_empty());
    }
    let done = run(&["--json", "fork-tree", "x", "-n", "17"]).await;
    let error: Value = serde_json::from_str(&err(&done)).unwrap();
    assert_eq!(error["code"], "usage");
}

#[tokio::test]
async fn help_and_version_are_no_errors() {
    for args in [&["--help"][..], &["--version"], &["sandbox", "exec", "--help"], &["explore", "-h"]] {
        let done = run(args).await;
        assert_eq!(done.status.code(), Some(0));
        assert!(!out(&done).is_empty());
    }
}

#[tokio::test]
async fn without_a_server_the_hint_says_what_to_do() {
    let done = run(&["--api", "http://127.0.0.1:1", "sandbox", "list"]).await;
    assert_eq!(done.status.code(), Some(1));
    assert!(err(&done).contains("Connection refused") && err(&done).contains("coppice up"), "{}", err(&done));
    let done = run(&["--api", "https://example.com", "sandbox", "list"]).await;
    assert!(err(&done).contains("TLS"), "{}", err(&done));
    let done = command(&["sandbox", "list"]).env_remove("PANDASTACK_API_KEY").output().await.unwrap();
    assert!(err(&done).contains("error: no server is known"), "{}", err(&done));
    assert!(err(&done).contains("hint: start one with `coppice up`"), "{}", err(&done));
}
