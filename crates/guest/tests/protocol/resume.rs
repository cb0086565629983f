//! The resume handshake, its hooks, and quiesce, with a system that records.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use std::{fs, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use crate::common::{Guest, resume_request, run, sh, within};
use coppice_guest::{Effect, NetworkConfig};
use coppice_guest_proto::v1;
use tonic::Code;
use uuid::Uuid;

fn hook(root: &Path, name: &str, mode: u32, script: &str) {
    let dir = root.join("etc/coppice/resume.d");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(dir.join(name), fs::Permissions::from_mode(mode)).unwrap();
}

fn fork_request() -> v1::ResumeRequest {
    v1::ResumeRequest {
        reason: v1::ResumeReason::Fork.into(),
        fork: Some(v1::ForkIdentity {
            parent: "sandbox-0".into(),
            tree: "tree-1".into(),
            index: 2,
            count: 4,
            mode: "fork-tree".into(),
        }),
        net: Some(network(2)),
        ..resume_request()
    }
}

fn network(host: u8) -> v1::Network {
    v1::Network {
        mac: format!("02:63:00:00:00:{host:02x}"),
        ip: format!("10.203.1.{host}"),
        prefix: 32,
        gateway: "10.203.0.1".into(),
        dns: vec!["10.203.0.1".into()],
    }
}

fn config(host: u8) -> NetworkConfig {
    NetworkConfig::try_from(&network(host)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_in_order_and_once_per_generation() {
    let guest = Guest::new();
    let root = guest.root.path();
    // An hour behind, as after a restore.
    guest.system.set_clock_error_ns(-3_600_000_000_000);
    hook(root, "10-first", 0o755, "echo $COPPICE_FORK_INDEX $COPPICE_REASON $COPPICE_SANDBOX_ID > order");
    hook(
        root,
        "20-second",
        0o755,
        "cat etc/hostname etc/resolv.conf run/coppice/identity.json >> order; echo x >> count",
    );
    let mut client = guest.session().await;
    let request = fork_request();
    let reply = client.resume(request.clone()).await.unwrap().into_inner();
    assert_eq!(reply.generation, request.generation);
    let off = reply.clock_error_ns + 3_600_000_000_000;
    assert!(off.abs() < 2_000_000_000, "{off}");
    let hooks: Vec<_> = reply.hooks.iter().map(|h| (h.name.as_str(), h.exit_code, h.timed_out)).collect();
    assert_eq!(hooks, [("10-first", 0, false), ("20-second", 0, false)]);

    let effects = guest.system.effects();
    assert!(matches!(effects[0], Effect::StepClock(ns) if ns >= request.wall_clock_unix_ns));
    assert_eq!(
        effects[1..],
        [
            Effect::AddEntropy(vec![7; 64]),
            Effect::SetHostname("sbx-1".into()),
            Effect::SetNetwork(None, config(2)),
            Effect::ReseedProcesses,
        ]
    );
    assert_eq!(fs::read_to_string(root.join("etc/resolv.conf")).unwrap(), "nameserver 10.203.0.1\n");
    assert_eq!(fs::read_to_string(root.join("etc/hostname")).unwrap(), "sbx-1\n");
    assert_eq!(fs::read_to_string(root.join("etc/machine-id")).unwrap(), "0123456789abcdef0123456789abcdef\n");
    let identity: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(root.join("run/coppice/identity.json")).unwrap()).unwrap();
    let generation = Uuid::from_slice(&request.generation).unwrap().to_string();
    // What looks like another boot to programs is another one in each copy.
    assert_eq!(fs::read_to_string(root.join("run/coppice/boot_id")).unwrap(), format!("{generation}\n"));
    assert_eq!(
        identity,
        serde_json::json!({
            "generation": generation, "sandbox_id": "sandbox-1", "reason": "fork", "hostname": "sbx-1",
            "machine_id": "0123456789abcdef0123456789abcdef",
            "fork": {"parent": "sandbox-0", "tree": "tree-1", "index": 2, "count": 4, "mode": "fork-tree"},
            "net": {
                "mac": "02:63:00:00:00:02", "ip": "10.203.1.2", "prefix": 32, "gateway": "10.203.0.1", "dns": ["10.203.0.1"]
            },
        })
    );
    let order = fs::read_to_string(root.join("order")).unwrap();
    assert!(
        order.starts_with("2 fork sandbox-1\nsbx-1\nnameserver 10.203.0.1\n{") && order.contains(&generation),
        "{order}"
    );

    // The same generation again, also at the same time: the same answer, and nothing done twice.
    let again = (0..5).map(|_| {
        let (mut client, request) = (client.clone(), request.clone());
        async move { client.resume(request).await.unwrap().into_inner() }
    });
    assert!(futures::future::join_all(again).await.iter().all(|again| *again == reply));
    assert_eq!(guest.system.effects().len(), 5);
    assert_eq!(fs::read_to_string(root.join("count")).unwrap(), "x\n");
    assert_eq!(client.info(v1::InfoRequest {}).await.unwrap().into_inner().generation, request.generation);

    // Another generation: everything again, but for the network, which is the same.
    let again = fork_request();
    client.resume(again.clone()).await.unwrap();
    assert_eq!(guest.system.effects().len(), 9);
    let boot_id = fs::read_to_string(root.join("run/coppice/boot_id")).unwrap();
    assert_eq!(boot_id, format!("{}\n", Uuid::from_slice(&again.generation).unwrap()));

    // One that wakes has not booted.
    client.resume(v1::ResumeRequest { reason: v1::ResumeReason::Wake.into(), ..fork_request() }).await.unwrap();
    assert_eq!(fs::read_to_string(root.join("run/coppice/boot_id")).unwrap(), boot_id);
    assert!(
        !fs::read_dir(root.join("etc")).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().starts_with('.'))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_refused_and_changes_nothing() {
    let guest = Guest::new();
    let mut client = guest.session().await;
    let good = resume_request;
    for bad in [
        v1::ResumeRequest { generation: vec![1; 15], ..good() },
        v1::ResumeRequest { generation: vec![], ..good() },
        v1::ResumeRequest { reason: 0, ..good() },
        v1::ResumeRequest { reason: 99, ..good() },
        v1::ResumeRequest { wall_clock_unix_ns: 0, ..good() },
        v1::ResumeRequest { wall_clock_unix_ns: i64::MIN, ..good() },
        v1::ResumeRequest { entropy: vec![1; 63], ..good() },
        v1::ResumeRequest { entropy: vec![1; 4097], ..good() },
        v1::ResumeRequest { hostname: "a b".into(), ..good() },
        v1::ResumeRequest { hostname: "../x".into(), ..good() },
        v1::ResumeRequest { hostname: String::new(), ..good() },
        v1::ResumeRequest { machine_id: "0123456789ABCDEF0123456789ABCDEF".into(), ..good() },
        v1::ResumeRequest { machine_id: "ab".into(), ..good() },
        v1::ResumeRequest { sandbox_id: "a\nb".into(), ..good() },
        v1::ResumeRequest { sandbox_id: "a".repeat(300), ..good() },
        v1::ResumeRequest { net: Some(v1::Network { dns: vec!["10.203.0.1".into(); 17], ..network(2) }), ..good() },
        v1::ResumeRequest { net: Some(v1::Network { dns: vec!["a\nb".into()], ..network(2) }), ..good() },
        v1::ResumeRequest { net: Some(v1::Network { mac: "01:00:5e:00:00:01".into(), ..network(2) }), ..good() },
        v1::ResumeRequest { net: Some(v1::Network { ip: "::1".into(), ..network(2) }), ..good() },
        v1::ResumeRequest { net: Some(v1::Network::default()), ..good() },
        v1::ResumeRequest { net: Some(v1::Network::default()), reason: v1::ResumeReason::Bake.into(), ..good() },
    ] {
        let error = client.resume(bad).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    }
    assert!(guest.system.effects().is_empty());
    assert!(guest.service.generation().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_reseed_there_is_no_handshake() {
    let guest = Guest::new();
    guest.system.fail_entropy(Some(libc::ENOTTY));
    let mut client = guest.session().await;
    let request = resume_request();
    assert_eq!(client.resume(request.clone()).await.unwrap_err().code(), Code::Internal);
    assert_eq!(run(&mut client, sh("true")).await.unwrap_err().code(), Code::FailedPrecondition);
    // The same generation can be tried again, since it was not acknowledged.
    guest.system.fail_entropy(None);
    client.resume(request).await.unwrap();
    run(&mut client, sh("true")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_changes_its_address_and_drops_the_connections_of_the_old_one() {
    let guest = Guest::new();
    let mut client = guest.session().await;
    let resume = |host, reason: v1::ResumeReason| v1::ResumeRequest {
        net: Some(network(host)),
        reason: reason.into(),
        ..resume_request()
    };
    client.resume(resume(2, v1::ResumeReason::Create)).await.unwrap();
    // What the sandbox's user wrote there is kept, as long as the host says the same.
    let resolv = guest.root.path().join("etc/resolv.conf");
    fs::write(&resolv, "mine").unwrap();
    let network_effects = |from: usize| {
        let network = |e: &Effect| matches!(e, Effect::SetNetwork(..) | Effect::EndConnections(_));
        guest.system.effects()[from..].iter().filter(|e| network(e)).cloned().collect::<Vec<_>>()
    };
    let before = guest.system.effects().len();
    client.resume(resume(3, v1::ResumeReason::Fork)).await.unwrap();
    let old = config(2).address;
    assert_eq!(network_effects(before), [Effect::SetNetwork(Some(old), config(3)), Effect::EndConnections(old)]);
    assert_eq!(fs::read_to_string(&resolv).unwrap(), "mine");

    // An unpause doesn't touch it, even if it says something; a wake has the same again.
    let before = guest.system.effects().len();
    client.resume(resume(9, v1::ResumeReason::Unpause)).await.unwrap();
    client.resume(resume(3, v1::ResumeReason::Wake)).await.unwrap();
    assert_eq!(network_effects(before), []);

    // A wake in another slot that has the same address: only the MAC.
    let before = guest.system.effects().len();
    let mac = v1::Network { mac: network(4).mac, ..network(3) };
    client.resume(v1::ResumeRequest { net: Some(mac.clone()), ..resume(3, v1::ResumeReason::Wake) }).await.unwrap();
    let mac = NetworkConfig::try_from(&mac).unwrap();
    assert_eq!(network_effects(before), [Effect::SetNetwork(Some(config(3).address), mac)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_own_network_there_is_no_handshake() {
    let guest = Guest::new();
    let mut client = guest.session().await;
    client.resume(v1::ResumeRequest { net: Some(network(2)), ..resume_request() }).await.unwrap();
    let generation = guest.service.generation();
    hook(guest.root.path(), "hook", 0o755, "echo ran > ran");
    let fork = v1::ResumeRequest { net: Some(network(3)), ..fork_request() };

    guest.system.fail_network(Some(libc::ENODEV));
    let error = client.resume(fork.clone()).await.unwrap_err();
    assert!(error.message().contains("setting the network"), "{error:?}");
    guest.system.fail_network(None);
    guest.system.fail_connections(Some(libc::EOPNOTSUPP));
    let error = client.resume(fork.clone()).await.unwrap_err();
    assert!(error.message().contains("ending the connections from 10.203.1.2"), "{error:?}");
    assert_eq!(guest.service.generation(), generation);
    assert!(!guest.root.path().join("ran").exists());

    // Tried again, it starts from what was last acknowledged: the connections are not forgotten.
    guest.system.fail_connections(None);
    let before = guest.system.effects().len();
    client.resume(fork).await.unwrap();
    assert!(guest.system.effects()[before..].contains(&Effect::EndConnections(config(2).address)));
    assert!(guest.root.path().join("ran").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bake_may_have_a_network() {
    let guest = Guest::new();
    let mut client = guest.session().await;
    let bake = v1::ResumeRequest { reason: v1::ResumeReason::Bake.into(), net: Some(network(2)), ..resume_request() };
    client.resume(bake).await.unwrap();
    let create = v1::ResumeRequest { net: Some(network(3)), ..resume_request() };
    client.resume(create).await.unwrap();
    let (effects, old) = (guest.system.effects(), config(2).address);
    assert!(effects.contains(&Effect::SetNetwork(None, config(2))));
    assert!(effects.contains(&Effect::SetNetwork(Some(old), config(3))));
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_that_are_listened_on_are_listed() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let guest = Guest::new();
    let mut client = guest.session().await;
    let refused = client.list_ports(v1::ListPortsRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    client.resume(resume_request()).await.unwrap();
    let list = client.list_ports(v1::ListPortsRequest {}).await.unwrap().into_inner();
    let port = u32::from(listener.local_addr().unwrap().port());
    let found = list.ports.iter().find(|found| found.port == port).unwrap();
    assert!(found.loopback_only && !found.process.is_empty(), "{found:?}");
    drop(listener);
    // A command that another test of this process is starting has a copy of it until its exec.
    within(Duration::from_secs(10), async {
        while client
            .list_ports(v1::ListPortsRequest {})
            .await
            .unwrap()
            .into_inner()
            .ports
            .iter()
            .any(|p| p.port == port)
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unpause_steps_the_clock_and_a_bake_makes_no_identity() {
    let guest = Guest::new();
    hook(guest.root.path(), "hook", 0o755, "echo ran > ran");
    let mut client = guest.session().await;
    let bake = v1::ResumeRequest {
        reason: v1::ResumeReason::Bake.into(),
        hostname: String::new(),
        machine_id: String::new(),
        ..resume_request()
    };
    client.resume(bake).await.unwrap();
    assert!(matches!(guest.system.effects()[..], [Effect::StepClock(_), Effect::AddEntropy(_)]));
    run(&mut client, sh("true")).await.unwrap();
    client.resume(resume_request()).await.unwrap();
    let before = guest.system.effects().len();
    fs::remove_file(guest.root.path().join("ran")).unwrap();
    let unpause = v1::ResumeRequest {
        reason: v1::ResumeReason::Unpause.into(),
        entropy: Vec::new(),
        hostname: String::new(),
        machine_id: String::new(),
        sandbox_id: String::new(),
        ..resume_request()
    };
    guest.system.set_clock_error_ns(-20_000_000_000);
    client.resume(unpause.clone()).await.unwrap();
    assert!(matches!(guest.system.effects()[before..], [Effect::StepClock(_)]));
    assert!(!guest.root.path().join("ran").exists());
    assert_eq!(guest.service.generation(), Some(unpause.generation.clone()));
    // A message that was on its way for a while puts no clock back that is right; a clock that is far ahead is wrong.
    for (ahead, steps) in [(300_000_000, 1), (20_000_000_000, 2)] {
        guest.system.set_clock_error_ns(ahead);
        client.resume(v1::ResumeRequest { generation: Uuid::new_v4().into(), ..unpause.clone() }).await.unwrap();
        assert_eq!(guest.system.effects().len(), before + steps, "{ahead}");
    }
    // It is still who it was.
    assert_eq!(run(&mut client, sh("echo $COPPICE_SANDBOX_ID")).await.unwrap().text(), "sandbox-1");
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_that_fail_or_hang_are_reported_and_stop_nothing() {
    let guest = Guest::new();
    let root = guest.root.path();
    hook(root, "10-fails", 0o755, "exit 9");
    hook(root, "20-hangs", 0o755, "sleep 60 & sleep 60");
    hook(root, "30-is-not-executable", 0o644, "exit 1");
    hook(root, "40-runs", 0o755, "exit 0");
    fs::create_dir(root.join("etc/coppice/resume.d/25-dir")).unwrap();
    std::os::unix::fs::symlink("/bin/false", root.join("etc/coppice/resume.d/26-link")).unwrap();
    let mut client = guest.session().await;
    let reply = within(Duration::from_secs(15), client.resume(resume_request())).await.unwrap().into_inner();
    let hooks: Vec<_> = reply.hooks.iter().map(|h| (h.name.as_str(), h.exit_code, h.timed_out)).collect();
    assert_eq!(hooks, [("10-fails", 9, false), ("20-hangs", 137, true), ("40-runs", 0, false)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn quiesce_and_thaw() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let before = guest.system.effects().len();
    assert!(client.quiesce(v1::QuiesceRequest { max_freeze_ms: 60_000 }).await.unwrap().into_inner().frozen);
    assert_eq!(guest.system.effects()[before..], [Effect::Sync, Effect::Freeze]);
    assert!(client.thaw(v1::ThawRequest {}).await.unwrap().into_inner().was_frozen);
    assert!(!client.thaw(v1::ThawRequest {}).await.unwrap().into_inner().was_frozen);
    assert_eq!(guest.system.effects()[before..], [Effect::Sync, Effect::Freeze, Effect::Thaw]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_goes_on_by_the_word_or_at_the_end_of_a_handshake() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let before = guest.system.effects().len();
    client.hold(v1::HoldRequest::default()).await.unwrap();
    assert!(client.release(v1::ReleaseRequest {}).await.unwrap().into_inner().was_held);
    assert!(!client.release(v1::ReleaseRequest {}).await.unwrap().into_inner().was_held);
    assert_eq!(guest.system.effects()[before..], [Effect::HoldProcesses, Effect::ReleaseProcesses]);

    client.hold(v1::HoldRequest::default()).await.unwrap();
    // A handshake that fails lets nothing go on, and neither does a session of the next host.
    guest.system.fail_entropy(Some(libc::ENOTTY));
    client.resume(fork_request()).await.unwrap_err();
    let mut client = guest.session().await;
    assert_eq!(guest.system.effects().iter().filter(|e| **e == Effect::ReleaseProcesses).count(), 1);
    guest.system.fail_entropy(None);
    client.resume(fork_request()).await.unwrap();
    let effects = guest.system.effects();
    assert_eq!(effects[effects.len() - 2..], [Effect::ReseedProcesses, Effect::ReleaseProcesses]);
    assert!(!client.release(v1::ReleaseRequest {}).await.unwrap().into_inner().was_held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_asked_for_while_all_is_held_is_dropped_with_its_session() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    client.hold(v1::HoldRequest::default()).await.unwrap();
    let root = guest.root.path().to_owned();
    let command = format!("touch {}/ran", root.display());
    let waiting = tokio::spawn({
        let mut client = client.clone();
        async move { run(&mut client, sh(&command)).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    // A copy: another host's session, whose handshake runs hooks all the same.
    hook(&root, "10-hook", 0o755, "exit 0");
    let mut next = guest.session().await;
    let reply = within(Duration::from_secs(5), next.resume(fork_request())).await.unwrap().into_inner();
    assert_eq!(reply.hooks.len(), 1);
    waiting.await.unwrap().unwrap_err();
    assert_eq!(run(&mut next, sh("echo works")).await.unwrap().text(), "works");
    assert!(!root.join("ran").exists());
}
