//! Exec, through the protocol, with real processes.
#![expect(clippy::unwrap_used, clippy::panic, reason = "test helpers")]

use std::time::{Duration, Instant};

use crate::common::{Guest, alive, collect, input, run, run_with, sh, until, within};
use coppice_guest_proto::v1::{self, exec_input::Input, exec_output::Output};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

const SOON: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn output_is_bytes_and_the_exit_code_is_the_command_s() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let outcome = run(&mut client, sh(r"printf 'a\377\0b'; echo oops >&2; exit 3")).await.unwrap();
    assert_eq!(outcome.stdout, b"a\xff\0b");
    assert_eq!(outcome.error(), "oops");
    assert_eq!((outcome.exit.exit_code, outcome.exit.signal, outcome.exit.timed_out), (3, 0, false));
    assert!(outcome.pid.is_some());

    let killed = run(&mut client, sh("kill -TERM $$")).await.unwrap();
    assert_eq!((killed.exit.exit_code, killed.exit.signal), (143, 15));
    assert_eq!(guest.service.running_commands(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_output_of_the_command_itself_is_lost() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    for size in [1, 65_536, 65_537, 20_000_000] {
        let outcome = run(&mut client, sh(&format!("head -c {size} /dev/zero"))).await.unwrap();
        assert_eq!(outcome.stdout.len(), size);
        assert!(outcome.largest <= coppice_guest_proto::limits::CHUNK);
    }
    // A background child holds the pipe while the last bytes of the main process are in it.
    for _ in 0..20 {
        let outcome = run(&mut client, sh("sleep 60 & head -c 60000 /dev/zero; echo end >&2; kill $!")).await.unwrap();
        assert_eq!((outcome.stdout.len(), outcome.error().as_str()), (60_000, "end"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_does_not_read_stalls_the_command_and_not_the_agent() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let mark = guest.root.path().join("mark");
    let script = format!("head -c 20000000 /dev/zero; echo done > {}", mark.display());
    let stalled = client.exec(tokio_stream::iter([input(Input::Start(sh(&script)))])).await.unwrap().into_inner();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!mark.exists(), "20 MB were buffered somewhere");
    let quick = within(SOON, run(&mut client, sh("echo quick"))).await.unwrap();
    assert_eq!(quick.text(), "quick");
    assert_eq!(within(SOON, collect(stalled)).await.unwrap().stdout.len(), 20_000_000);
    assert!(mark.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_background_child_does_not_hold_the_call() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let begun = Instant::now();
    let outcome = run(&mut client, sh("sleep 30 & echo $!")).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let child = outcome.text().parse().unwrap();
    assert!(alive(child), "and it lives on");
    // One that never stops writing doesn't either.
    let begun = Instant::now();
    let noisy = within(SOON, run(&mut client, sh("yes & echo $! >&2"))).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5));
    drop(run(&mut client, sh(&format!("kill -9 {child} {}", noisy.error()))).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_is_streamed_and_closed() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let start = v1::ExecStart { stdin: true, ..sh("cat; echo end") };
    let more =
        vec![Input::Stdin(b"one ".to_vec()), Input::Stdin(vec![b'x'; 300_000]), Input::StdinClose(v1::StdinClose {})];
    let outcome = within(SOON, run_with(&mut client, start.clone(), more)).await.unwrap();
    assert_eq!(outcome.stdout.len(), 4 + 300_000 + 4);
    // The end of the call's input is the end of stdin too, and a command that closes its stdin is no error.
    let outcome = within(SOON, run_with(&mut client, start, vec![Input::Stdin(b"x".to_vec())])).await.unwrap();
    assert_eq!(outcome.text(), "xend");
    let closer = v1::ExecStart { stdin: true, ..sh("exec <&-; sleep 0.1; echo ok") };
    let outcome = within(SOON, run_with(&mut client, closer, vec![Input::Stdin(vec![0; 1 << 20])])).await.unwrap();
    assert_eq!(outcome.text(), "ok");
    // Without stdin the command has /dev/null, and input is an error.
    assert_eq!(run(&mut client, sh("cat; echo end")).await.unwrap().text(), "end");
    let error = within(SOON, run_with(&mut client, sh("sleep 30"), vec![Input::Stdin(vec![1])])).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    until(|| guest.service.running_commands() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_kills_the_whole_group() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let start = v1::ExecStart { timeout_ms: 200, ..sh("sleep 30 & echo $!; echo $$; sleep 30") };
    let begun = Instant::now();
    let outcome = within(SOON, run(&mut client, start)).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert!(outcome.exit.timed_out);
    assert_eq!((outcome.exit.exit_code, outcome.exit.signal), (137, 9));
    let text = outcome.text();
    let pids: Vec<u32> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(pids.len(), 2);
    until(|| !pids.iter().any(|&pid| alive(pid))).await;
    // One that ends in time is not timed out.
    let start = v1::ExecStart { timeout_ms: 20_000, ..sh("exit 4") };
    let outcome = run(&mut client, start).await.unwrap();
    assert_eq!((outcome.exit.exit_code, outcome.exit.timed_out), (4, false));
}

/// Starts a command that tells its pid and goes on; returns the call.
async fn long_running(
    client: &mut coppice_guest_proto::v1::guest_client::GuestClient<tonic::transport::Channel>,
    start: v1::ExecStart,
) -> (u32, tonic::Streaming<v1::ExecOutput>, mpsc::Sender<v1::ExecInput>) {
    let (tx, rx) = mpsc::channel(4);
    tx.send(input(Input::Start(start))).await.unwrap();
    let mut output = client.exec(ReceiverStream::new(rx)).await.unwrap().into_inner();
    let Some(Output::Started(started)) = output.message().await.unwrap().unwrap().output else {
        panic!("`started` comes first")
    };
    (started.pid, output, tx)
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelling_the_call_kills_the_group() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let (pid, output, input) = long_running(&mut client, sh("sleep 30 & sleep 30")).await;
    assert!(alive(pid));
    drop((output, input));
    until(|| !alive(pid)).await;
    until(|| guest.service.running_commands() == 0).await;
    // Also while its output is stuck.
    let (pid, output, input) = long_running(&mut client, sh("yes")).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    // Both: the client's HTTP/2 resets a stream only when neither half of it is held.
    drop((output, input));
    until(|| !alive(pid)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn losing_the_session_kills_nothing() {
    let guest = Guest::new();
    for round in 0..20 {
        let (mut ours, theirs) = tokio::net::UnixStream::pair().unwrap();
        let mut direct = guest.stream();
        crate::common::hello(&mut direct).await.unwrap();
        // A relay between client and guest, so that the stream can be cut under a living client.
        let relay = tokio::spawn(async move { tokio::io::copy_bidirectional(&mut ours, &mut direct).await });
        let mut client = crate::common::client(theirs).await;
        client.resume(crate::common::resume_request()).await.unwrap();
        let mark = guest.root.path().join(format!("mark-{round}"));
        // More output than any buffer holds, that nobody reads.
        let script = format!("head -c 9000000 /dev/zero; sleep 0.1; cat; echo done > {}; sleep 60", mark.display());
        let start = v1::ExecStart { stdin: true, timeout_ms: 3_000, ..sh(&script) };
        let (pid, _output, _input) = long_running(&mut client, start).await;
        relay.abort();
        until(|| mark.exists()).await;
        assert!(alive(pid), "the command goes on");
        if round == 19 {
            // ... under its timeout.
            until(|| !alive(pid)).await;
        }
    }
    until(|| guest.service.running_commands() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_session_kills_nothing_either() {
    let guest = Guest::new();
    let mut first = guest.resumed().await;
    let (pid, mut output, _input) = long_running(&mut first, sh("sleep 30")).await;
    let mut second = guest.session().await;
    assert!(within(SOON, output.message()).await.is_err(), "the old session has ended");
    assert!(alive(pid));
    assert_eq!(second.info(v1::InfoRequest {}).await.unwrap().into_inner().running_commands, 1);
    drop(run(&mut second, sh(&format!("kill -9 {pid}"))).await.unwrap());
    until(|| guest.service.running_commands() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_directory_and_user() {
    let guest = Guest::new();
    std::fs::create_dir_all(guest.root.path().join("etc")).unwrap();
    std::fs::create_dir_all(guest.root.path().join("home/ann")).unwrap();
    std::fs::write(
        guest.root.path().join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nann:x:1234:1235::/home/ann:/bin/sh\n",
    )
    .unwrap();
    std::fs::write(guest.root.path().join("etc/group"), "ann:x:1235:\nextra:x:4321:ann\n").unwrap();
    let mut client = guest.resumed().await;
    let env = "echo $USER $HOME $LANG $TERM $COPPICE_SANDBOX_ID $COPPICE_HOSTNAME $PATH";
    assert_eq!(
        run(&mut client, sh(env)).await.unwrap().text(),
        "root /root C.UTF-8 dumb sandbox-1 sbx-1 /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    );
    let start =
        v1::ExecStart { env: [("A".into(), "b c".into()), ("LANG".into(), "C".into())].into(), ..sh("echo $A $LANG") };
    assert_eq!(run(&mut client, start).await.unwrap().text(), "b c C");

    if rustix::process::geteuid().is_root() {
        // The directory of the test is for root alone.
        std::fs::set_permissions(guest.root.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for user in ["ann", "1234"] {
            let start = v1::ExecStart { user: user.into(), ..sh("id -u; id -g; id -G; pwd; echo $USER $HOME") };
            let text = run(&mut client, start).await.unwrap().text();
            let home = guest.root.path().join("home/ann");
            assert_eq!(text, format!("1234\n1235\n1235 4321\n{}\nann /home/ann", home.display()));
        }
    } else {
        eprintln!("skipped, because not root: switching users");
    }
    let start = v1::ExecStart { cwd: "/home".into(), ..sh("pwd") };
    assert_eq!(run(&mut client, start).await.unwrap().text(), guest.root.path().join("home").display().to_string());
    for bad in [
        v1::ExecStart { user: "eve".into(), ..sh("true") },
        v1::ExecStart { cwd: "/nowhere".into(), ..sh("true") },
        v1::ExecStart { cwd: "relative".into(), ..sh("true") },
        v1::ExecStart { env: [("A=B".into(), String::new())].into(), ..sh("true") },
        v1::ExecStart { argv: vec!["a\0b".into()], ..Default::default() },
        v1::ExecStart { argv: vec!["true".into(), "x".repeat(2 << 20)], ..Default::default() },
        v1::ExecStart::default(),
    ] {
        assert_eq!(run(&mut client, bad).await.unwrap_err().code(), Code::InvalidArgument);
    }
    until(|| guest.service.running_commands() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_t_be_executed_ends_as_in_a_shell() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let exec = |program: &str| v1::ExecStart { argv: vec![program.into()], ..Default::default() };
    let missing = run(&mut client, exec("no-such-program")).await.unwrap();
    assert_eq!((missing.exit.exit_code, missing.error().as_str()), (127, "no-such-program: not found"));
    assert_eq!(run(&mut client, exec("/etc")).await.unwrap().exit.exit_code, 126);
    let plain = guest.root.path().join("plain");
    std::fs::write(&plain, "not a program").unwrap();
    assert_eq!(run(&mut client, exec(plain.to_str().unwrap())).await.unwrap().exit.exit_code, 126);
    // argv[0] is found on the command's own PATH.
    let found = v1::ExecStart { argv: vec!["true".into()], ..Default::default() };
    assert_eq!(run(&mut client, found).await.unwrap().exit.exit_code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_starts_clean() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let script = "ls /proc/self/fd | wc -l; cat /proc/self/oom_score_adj; \
                  echo $(ps -o sid= -p $$) $(ps -o pgid= -p $$) $$; cat /proc/self/status";
    let text = run(&mut client, sh(script)).await.unwrap().text();
    let lines: Vec<_> = text.lines().collect();
    // As many as any child of this process gets: what the test's own parent let through, and none of the agent's.
    let plain = std::process::Command::new("/bin/sh").args(["-c", "ls /proc/self/fd | wc -l"]).output().unwrap();
    assert_eq!(lines[0], String::from_utf8_lossy(&plain.stdout).trim(), "{text}");
    assert_eq!(lines[1], "500");
    let ids: Vec<_> = lines[2].split(' ').collect();
    assert!(ids[0] == ids[2] && ids[1] == ids[2], "own session and group: {text}");
    let signals = |name: &str| {
        let line = lines.iter().find_map(|line| line.strip_prefix(name)).unwrap();
        // Without 32 and 33, which belong to libc and can't be set through it.
        u64::from_str_radix(line.trim(), 16).unwrap() & !(3 << 31)
    };
    assert_eq!([signals("SigBlk:"), signals("SigIgn:"), signals("SigCgt:")], [0; 3], "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_and_no_more_than_the_limit() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let runs = (0..100).map(|i| {
        let mut client = client.clone();
        async move { run(&mut client, sh(&format!("echo {i}; exit {}", i % 7))).await.unwrap() }
    });
    let outcomes = within(Duration::from_secs(30), futures::future::join_all(runs)).await;
    for (i, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.text(), i.to_string());
        assert_eq!(outcome.exit.exit_code, i32::try_from(i % 7).unwrap());
    }
    let mut held = Vec::new();
    let sleep = v1::ExecStart { argv: vec!["sleep".into(), "60".into()], ..Default::default() };
    for _ in 0..coppice_guest_proto::limits::MAX_COMMANDS {
        held.push(long_running(&mut client, sleep.clone()).await);
    }
    let refused = run(&mut client, sleep.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(guest.service.running_commands(), coppice_guest_proto::limits::MAX_COMMANDS);
    drop(held);
    until(|| guest.service.running_commands() == 0).await;
    assert_eq!(run(&mut client, sh("echo again")).await.unwrap().text(), "again");
}
