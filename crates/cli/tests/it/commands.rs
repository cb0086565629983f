//! Client commands against the small cloud.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{A, B, Cloud, err, out};

#[tokio::test]
async fn exec_streams_and_ends_with_the_commands_code() {
    let cloud = Cloud::start().await;
    let done = cloud
        .run(&["sandbox", "exec", "aaaa", "--timeout", "5", "-e", "K=V=W", "-w", "/tmp", "--", "ls", "-l", "a b"])
        .await;
    assert_eq!((done.status.code(), out(&done).as_str(), err(&done).as_str()), (Some(7), "oé", "e"));
    let body = cloud.body(&format!("POST /v1/sandboxes/{A}/exec/stream"));
    assert_eq!(body, json!({"cmd": "ls -l 'a b'", "timeout_seconds": 5.0, "env": {"K": "V=W"}, "cwd": "/tmp"}));

    let done = cloud.run_with(&["sandbox", "exec", B, "cat"], "in é\n".as_bytes()).await;
    assert_eq!(done.status.code(), Some(7));
    assert_eq!(cloud.body(&format!("POST /v1/sandboxes/{B}/exec/stream"))["stdin"], "in é\n");
    let done = cloud.run_with(&["sandbox", "exec", B, "cat"], b"\xff\xfe").await;
    assert_eq!(done.status.code(), Some(1));
    assert!(err(&done).contains("hint: copy it into the sandbox"), "{}", err(&done));
}

#[tokio::test]
async fn exec_says_when_it_does_not_know_the_end() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["sandbox", "exec", A, "--", "slow"]).await;
    assert_eq!(done.status.code(), Some(124));
    assert!(err(&done).contains("error: command timeout after 1s"));
    let done = cloud.run(&["sandbox", "exec", A, "--", "cut"]).await;
    assert_eq!(done.status.code(), Some(1));
    assert!(err(&done).contains("whether it finished is unknown"));
    let done = cloud.run(&["--json", "sandbox", "exec", A, "--", "true"]).await;
    assert_eq!(done.status.code(), Some(3));
    assert_eq!(serde_json::from_str::<Value>(&out(&done)).unwrap()["stdout"], "out\n");
}

#[tokio::test]
async fn a_fork_says_first_what_was_inherited() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["fork-tree", "aaaa", "-n", "2", "--ttl", "60", "-m", "a=b"]).await;
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    assert_eq!(out(&done).lines().next(), Some("inherited memory and disk"));
    assert!(
        out(&done).contains("paused for 12 ms; 1.0 MiB of memory copied; disk cloned by reference"),
        "{}",
        out(&done)
    );
    let body = cloud.body(&format!("POST /v1/sandboxes/{A}/fork-tree"));
    assert_eq!(body, json!({"count": 2, "metadata": {"a": "b", "explore_ttl": "60"}}));
    let done = cloud.run(&["fork-tree", "aaaa", "--json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out(&done)).unwrap()["children"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_fork_is_of_the_disk_or_warm() {
    let path = format!("POST /v1/sandboxes/{A}/fork");
    for (more, mode) in [(&[][..], "disk"), (&["--warm"], "warm"), (&["--mode", "warm"], "warm")] {
        let cloud = Cloud::start().await;
        let done = cloud.run(&[&["fork", "aaaa", "--json"], more].concat()).await;
        assert_eq!(done.status.code(), Some(0), "{}", err(&done));
        assert_eq!(cloud.body(&path), json!({"count": 1, "mode": mode}));
    }
}

#[tokio::test]
async fn ids_are_unique_beginnings() {
    let cloud = Cloud::start().await;
    assert_eq!(cloud.run(&["sandbox", "get", "bb"]).await.status.code(), Some(0));
    let done = cloud.run(&["sandbox", "get", "b"]).await;
    assert_eq!(done.status.code(), Some(1));
    assert!(err(&done).starts_with("error: \"b\" is the beginning of 2 sandboxes"), "{}", err(&done));
    let done = cloud.run(&["--json", "sandbox", "rm", "aaaa", "x"]).await;
    let error: Value = serde_json::from_str(&err(&done)).unwrap();
    assert_eq!((done.status.code(), &error["code"]), (Some(1), &json!("sandbox_not_found")));
    assert!(!cloud.lines().iter().any(|line| line.starts_with("DELETE")), "a mistyped id deletes nothing");
    let done = cloud.run(&["sandbox", "rm", "aaaa", "bb"]).await;
    assert_eq!(done.status.code(), Some(0));
    assert_eq!(cloud.with(|state| state.sandboxes.len()), 1);
}

#[tokio::test]
async fn a_network_policy_is_shown_and_changed() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["sandbox", "create", "base", "--egress", "example.org:443,10.1.2.3"]).await;
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    let allow = json!({"egress": {"allow": ["example.org:443", "10.1.2.3"]}});
    assert_eq!(cloud.body("POST /v1/sandboxes")["network"], allow);
    assert_eq!(out(&cloud.run(&["sandbox", "network", "aaaa"]).await), "egress: none\n");
    let done = cloud.run(&["sandbox", "network", "aaaa", "--egress", "*.example.org"]).await;
    assert_eq!(out(&done), "egress: *.example.org\n", "{}", err(&done));
    let changed = json!({"egress": {"allow": ["*.example.org"]}});
    assert_eq!(cloud.body(&format!("PATCH /v1/sandboxes/{A}/network")), changed);
    let done = cloud.run(&["sandbox", "network", "aaaa", "--egress", "open", "--json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out(&done)).unwrap(), json!({"egress": "open"}));
    let done = cloud.run(&["sandbox", "network", "aaaa", "--egress", "a,,b"]).await;
    assert_eq!(done.status.code(), Some(2), "{}", err(&done));
}

#[tokio::test]
async fn lists_are_tables_or_json() {
    let cloud = Cloud::start().await;
    let done = cloud.run(&["sandbox", "list"]).await;
    assert!(out(&done).starts_with("SANDBOX "), "{}", out(&done));
    assert!(!out(&done).contains('\x1b'));
    let done = cloud.run(&["tree"]).await;
    let shape: Vec<String> = out(&done).lines().map(|line| line.split("  ").next().unwrap().to_owned()).collect();
    assert_eq!(shape, ["aaaaaaaa", "├─ bbbbbbbb", "└─ bcbcbcbc"]);
    let done = cloud.run(&["sandbox", "list", "--json"]).await;
    assert_eq!(serde_json::from_str::<Value>(&out(&done)).unwrap().as_array().unwrap().len(), 3);
    assert_eq!(out(&cloud.run(&["sandbox", "logs", A, "--tail", "1"]).await), "two\n");
    assert!(out(&cloud.run(&["version"]).await).contains("engine fake"));
    assert!(out(&cloud.run(&["snapshot", "ls"]).await).contains("no snapshots"));
    let done = cloud.run(&["--color", "always", "sandbox", "list"]).await;
    assert!(out(&done).contains('\x1b'));
}

#[tokio::test]
async fn files_are_copied_in_and_out() {
    let cloud = Cloud::start().await;
    let dir = tempfile::tempdir().unwrap();
    let local = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir_all(dir.path().join("tree/sub")).unwrap();
    std::fs::write(dir.path().join("tree/run.sh"), b"#!/bin/sh\n\xff").unwrap();
    std::fs::set_permissions(dir.path().join("tree/run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(dir.path().join("tree/sub/a"), b"").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("tree/link")).unwrap();

    // The cloud's exec ends with 3: the executable bit can't be set, and that is said.
    let done = cloud.run(&["sandbox", "cp", &local("tree/run.sh"), "aaaa:/tmp"]).await;
    assert!(err(&done).contains("could not be made executable"), "{}", err(&done));
    assert_eq!(cloud.with(|state| state.files["/tmp/run.sh"].clone()), b"#!/bin/sh\n\xff");
    std::fs::set_permissions(dir.path().join("tree/run.sh"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let done = cloud.run(&["sandbox", "cp", &local("tree"), "aaaa:/new"]).await;
    assert_eq!(out(&done), "copied 2 files, 11 B\n", "{}", err(&done));
    assert!(err(&done).contains("tree/link"));
    assert!(cloud.with(|state| state.files.contains_key("/new/sub/a")));

    let done = cloud.run(&["sandbox", "cp", "aaaa:/new", &local("back")]).await;
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    assert_eq!(std::fs::read(dir.path().join("back/run.sh")).unwrap(), b"#!/bin/sh\n\xff");
    assert_eq!(std::fs::read(dir.path().join("back/sub/a")).unwrap(), b"");
    let done = cloud.run(&["sandbox", "cp", "aaaa:/new/run.sh", "-"]).await;
    assert_eq!(done.stdout, b"#!/bin/sh\n\xff");
    let done = cloud.run_with(&["sandbox", "cp", "-", "aaaa:/piped"], b"\x00\x01").await;
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    assert_eq!(cloud.with(|state| state.files["/piped"].clone()), [0, 1]);
    let done = cloud.run(&["sandbox", "cp", "aaaa:/none", &local("none")]).await;
    assert_eq!(
        (done.status.code(), err(&done).as_str()),
        (Some(1), "error: there is no such thing\nhint: look again\n")
    );
    assert!(!dir.path().join("none").exists());
}

#[tokio::test]
async fn an_interrupted_create_leaves_nothing() {
    let cloud = Cloud::start().await;
    cloud.with(|state| state.create_delay = Duration::from_millis(700));
    let child = cloud.spawn(&["sandbox", "create", "base"]);
    while !cloud.lines().iter().any(|line| line.starts_with("POST")) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let done = child.wait_with_output().await.unwrap();
    assert_eq!(done.status.code(), Some(130), "{}", err(&done));
    assert!(err(&done).contains("was deleted again"), "{}", err(&done));
    assert_eq!(cloud.with(|state| state.sandboxes.len()), 3);
}
