//! Drives the agent of a real machine over its two ports, and says what it saw. For trying out a kernel, an initramfs or
//! the agent by hand; the real-VM tests are elsewhere.
//!
//! `drive SOCKET0 SOCKET1 first|again|child|cut|sh|die [PORT [ARG]]`: the sockets are QEMU's chardevs of `coppice.agent.0` and `.1`.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a tool for trying things out: it stops at the first surprise")]

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coppice_guest_proto::{
    limits,
    session::{Hello, PREAMBLE_LEN, Welcome},
    v1::{self, exec_input::Input, exec_output::Output, guest_client::GuestClient, write_file_input},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};
use tonic::transport::{Channel, Endpoint};
use uuid::Uuid;

type Client = GuestClient<Channel>;

async fn attempt(path: &str, wait: Duration) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path).await?;
    let session = Uuid::new_v4();
    stream.write_all(&Hello { session }.encode()).await?;
    let answer = timeout(wait, async {
        // What an old session still has to say may come first.
        let (mut seen, wanted) = (Vec::new(), Welcome { session }.encode());
        while !seen.ends_with(&wanted) {
            seen.push(stream.read_u8().await?);
        }
        Ok::<_, std::io::Error>(seen.len() - PREAMBLE_LEN)
    });
    let skipped = answer.await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    if skipped > 0 {
        println!("  (skipped {skipped} old bytes)");
    }
    Ok(stream)
}

async fn connect(path: &str) -> Client {
    let begun = Instant::now();
    let mut tries = 0;
    let stream = loop {
        tries += 1;
        match attempt(path, Duration::from_millis(1000)).await {
            Ok(stream) => break stream,
            Err(error) if begun.elapsed() > Duration::from_secs(120) => panic!("{path}: {error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    println!("session on {path} after {:?}, {tries} tries", begun.elapsed());
    let mut stream = Some(stream);
    let channel = Endpoint::from_static("http://guest")
        .initial_stream_window_size(limits::STREAM_WINDOW)
        .initial_connection_window_size(limits::CONNECTION_WINDOW)
        .connect_with_connector(tower::service_fn(move |_| {
            let stream = stream.take();
            async move { stream.map(hyper_util::rt::TokioIo::new).ok_or(std::io::Error::other("once")) }
        }))
        .await
        .unwrap();
    GuestClient::new(channel)
}

async fn resume(client: &mut Client, reason: v1::ResumeReason, name: &str) {
    let entropy: Vec<u8> = (0..8).flat_map(|_| *Uuid::new_v4().as_bytes()).collect();
    let request = v1::ResumeRequest {
        generation: Uuid::new_v4().as_bytes().to_vec(),
        reason: reason.into(),
        wall_clock_unix_ns: i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap(),
        entropy,
        hostname: name.into(),
        machine_id: Uuid::new_v4().simple().to_string(),
        sandbox_id: name.into(),
        ..Default::default()
    };
    let begun = Instant::now();
    let reply = client.resume(request).await.unwrap().into_inner();
    println!(
        "resume: {:?} seen here, {} us in the guest; clock was off by {} ms; hooks {:?}",
        begun.elapsed(),
        reply.took_us,
        reply.clock_error_ns / 1_000_000,
        reply.hooks
    );
}

async fn sh(client: &mut Client, script: &str, timeout_ms: u64) -> (String, i32) {
    let start =
        v1::ExecStart { argv: vec!["/bin/sh".into(), "-c".into(), script.into()], timeout_ms, ..Default::default() };
    let mut output = client
        .exec(tokio_stream::iter([v1::ExecInput { input: Some(Input::Start(start)) }]))
        .await
        .unwrap()
        .into_inner();
    let (mut text, mut code, mut bytes) = (Vec::new(), -1, 0);
    while let Some(message) = output.message().await.unwrap() {
        match message.output {
            Some(Output::Stdout(out) | Output::Stderr(out)) => {
                bytes += out.len();
                if bytes < 100_000 {
                    text.extend(out);
                }
            }
            Some(Output::Exit(exit)) => code = exit.exit_code,
            _ => {}
        }
    }
    let text =
        if bytes < 100_000 { String::from_utf8_lossy(&text).trim_end().to_owned() } else { format!("{bytes} bytes") };
    (text, code)
}

async fn show(client: &mut Client, script: &str) {
    let begun = Instant::now();
    let (text, code) = sh(client, script, 20_000).await;
    println!("$ {script}  [{code}, {:?}]", begun.elapsed());
    text.lines().for_each(|line| println!("    {line}"));
}

async fn first(client: &mut Client) {
    println!("{:?}", client.info(v1::InfoRequest {}).await.unwrap().into_inner());
    resume(client, v1::ResumeReason::Create, "first").await;
    for script in [
        "hostname; cat /etc/hostname /etc/machine-id /run/coppice/identity.json; date -u; uname -r",
        "cat /proc/mounts; ls /; ls -l /dev/fd /dev/shm /dev/pts; ip addr show lo; ping -c1 -W1 127.0.0.1 | tail -2",
        "cat /proc/1/oom_score_adj /proc/self/oom_score_adj; ls -l /proc/self/fd; env; ulimit -n; cat /proc/sys/kernel/random/entropy_avail",
        "(sleep 0.2 & sleep 0.3 &) ; sleep 0.5; ps -o pid,ppid,stat,comm | grep -c ' Z' ; ps -o pid,ppid,stat,comm | grep -v '\\['",
        "sleep 1000 >/dev/null 2>&1 & echo started $!; echo unsynced > /root/file",
        "kill -9 1; kill -TERM 1; echo still here",
    ] {
        show(client, script).await;
    }
    let begun = Instant::now();
    let (_, code) = sh(client, "sleep 77 & sleep 77", 300).await;
    println!("timeout: code {code} after {:?}", begun.elapsed());
    show(client, "ps | grep -c '[s]leep 77'").await;
    bulk(client).await;
    let begun = Instant::now();
    let quiesced = client.quiesce(v1::QuiesceRequest { max_freeze_ms: 3000 }).await.unwrap().into_inner();
    println!("quiesce: {quiesced:?} after {:?}", begun.elapsed());
    let mut writer = client.clone();
    let blocked =
        tokio::spawn(
            async move { (sh(&mut writer, "echo x > /root/while-frozen; echo done", 0).await, Instant::now()) },
        );
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!blocked.is_finished(), "a write went through a frozen file system");
    show(client, "echo other commands run").await;
    println!("thaw: {:?}", client.thaw(v1::ThawRequest {}).await.unwrap().into_inner());
    println!("the write ended: {:?}", blocked.await.unwrap().0);
    client.quiesce(v1::QuiesceRequest { max_freeze_ms: 300 }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(600)).await;
    println!("thaw after the timer: {:?}", client.thaw(v1::ThawRequest {}).await.unwrap().into_inner());
}

async fn bulk(client: &mut Client) {
    let mut times = Vec::new();
    for _ in 0..30 {
        let begun = Instant::now();
        client.info(v1::InfoRequest {}).await.unwrap();
        let info = begun.elapsed();
        let begun = Instant::now();
        sh(client, "true", 0).await;
        times.push((begun.elapsed(), info));
    }
    times.sort();
    println!("exec of `true`, info: median {:?}", times[times.len() / 2]);
    let begun = Instant::now();
    let (text, _) = sh(client, "head -c 100000000 /dev/zero", 0).await;
    println!("{text} of output in {:?}", begun.elapsed());
    let begun = Instant::now();
    let start = v1::WriteFileStart { path: "/dev/shm/big".into(), mode: 0 };
    let parts = std::iter::once(write_file_input::Input::Start(start))
        .chain((0..800).map(|_| write_file_input::Input::Data(vec![7; 65_536])))
        .chain([write_file_input::Input::End(v1::WriteFileEnd {})])
        .map(|input| v1::WriteFileInput { input: Some(input) })
        .collect::<Vec<_>>();
    let written = client.write_file(tokio_stream::iter(parts)).await.unwrap().into_inner().bytes;
    println!("{written} bytes written in {:?}", begun.elapsed());
    let begun = Instant::now();
    let request = v1::ReadFileRequest { path: "/dev/shm/big".into(), ..Default::default() };
    let mut chunks = client.read_file(request).await.unwrap().into_inner();
    let mut read = 0;
    while let Some(chunk) = chunks.message().await.unwrap() {
        read += chunk.data.len();
    }
    println!("{read} bytes read in {:?}", begun.elapsed());
    show(client, "rm /dev/shm/big").await;
}

#[tokio::main]
async fn main() {
    let args: Vec<_> = std::env::args().collect();
    let [_, socket0, socket1, what, rest @ ..] = &args[..] else { panic!("see the source") };
    let port = if rest.first().is_some_and(|port| port == "1") { socket1 } else { socket0 };
    let mut client = connect(port).await;
    match what.as_str() {
        "first" => first(&mut client).await,
        "again" => {
            show(&mut client, "hostname; cat /proc/1/stat | cut -d' ' -f14,15; cat /proc/uptime").await;
            println!("running: {}", client.info(v1::InfoRequest {}).await.unwrap().into_inner().running_commands);
        }
        "child" => {
            resume(&mut client, v1::ResumeReason::Fork, rest.get(1).map_or("child", String::as_str)).await;
            show(
                &mut client,
                "hostname; ps | grep '[s]leep 1000'; cat /root/file; date -u; head -c 8 /dev/urandom | od -An -tx1",
            )
            .await;
        }
        // Ends in the middle of a download and of a command, as a killed daemon does.
        "cut" => {
            let mut busy = client.clone();
            tokio::spawn(async move {
                sh(&mut busy, "for i in $(seq 200); do head -c 1000000 /dev/zero; sleep 0.01; done; echo yes > /root/cut-survived", 0).await
            });
            tokio::time::sleep(Duration::from_millis(400)).await;
            std::process::abort();
        }
        "sh" => show(&mut client, rest.get(1).map_or("true", String::as_str)).await,
        "die" => show(&mut client, "kill -SEGV 1; echo o > /proc/sysrq-trigger; sleep 5").await,
        other => panic!("{other}?"),
    }
}
