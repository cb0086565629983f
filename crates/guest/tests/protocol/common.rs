//! A guest service in this process, and a host's client for it over a pair of unix sockets.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use std::{sync::Arc, time::Duration};

use coppice_guest::{GuestService, ReapMode, RecordingSystem, ServiceConfig, serve};
use coppice_guest_proto::{
    limits,
    session::{Hello, PREAMBLE_LEN, Welcome},
    v1::{self, exec_input::Input, exec_output::Output, guest_client::GuestClient},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};
use uuid::Uuid;

pub struct Guest {
    pub root: TempDir,
    pub system: Arc<RecordingSystem>,
    pub service: GuestService,
}

impl Guest {
    pub fn new() -> Self {
        let root = TempDir::new().unwrap();
        let system = Arc::new(RecordingSystem::new(root.path()));
        let service = GuestService::new(ServiceConfig { system: system.clone(), reap: ReapMode::Own }).unwrap();
        Self { root, system, service }
    }

    /// The host's end of a stream that the guest serves.
    pub fn stream(&self) -> UnixStream {
        let (host, guest) = UnixStream::pair().unwrap();
        let service = self.service.clone();
        tokio::spawn(async move { serve(guest, &service).await });
        host
    }

    /// A session on a stream of its own.
    pub async fn session(&self) -> GuestClient<Channel> {
        let mut stream = self.stream();
        hello(&mut stream).await.unwrap();
        client(stream).await
    }

    /// A session after a handshake.
    pub async fn resumed(&self) -> GuestClient<Channel> {
        let mut client = self.session().await;
        client.resume(resume_request()).await.unwrap();
        client
    }
}

/// Says hello and waits for the welcome.
pub async fn hello(stream: &mut UnixStream) -> std::io::Result<()> {
    let session = Uuid::new_v4();
    stream.write_all(&Hello { session }.encode()).await?;
    welcome(stream, session).await
}

pub async fn welcome(stream: &mut UnixStream, session: Uuid) -> std::io::Result<()> {
    let mut answer = [0; PREAMBLE_LEN];
    stream.read_exact(&mut answer).await?;
    assert_eq!(Welcome::decode(&answer), Ok(Welcome { session }));
    Ok(())
}

/// HTTP/2 over a stream whose preamble is done.
pub async fn client(stream: UnixStream) -> GuestClient<Channel> {
    let mut stream = Some(stream);
    let channel = Endpoint::from_static("http://guest")
        .initial_stream_window_size(limits::STREAM_WINDOW)
        .initial_connection_window_size(limits::CONNECTION_WINDOW)
        .connect_with_connector(tower::service_fn(move |_| {
            let stream = stream.take();
            async move { stream.map(hyper_util::rt::TokioIo::new).ok_or(std::io::Error::other("one connection only")) }
        }))
        .await
        .unwrap();
    GuestClient::new(channel).max_decoding_message_size(limits::MAX_MESSAGE)
}

pub fn resume_request() -> v1::ResumeRequest {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    v1::ResumeRequest {
        generation: Uuid::new_v4().as_bytes().to_vec(),
        reason: v1::ResumeReason::Create.into(),
        wall_clock_unix_ns: i64::try_from(now.as_nanos()).unwrap(),
        entropy: vec![7; 64],
        hostname: "sbx-1".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        net: None,
        fork: None,
        sandbox_id: "sandbox-1".into(),
    }
}

pub fn sh(script: &str) -> v1::ExecStart {
    v1::ExecStart { argv: vec!["/bin/sh".into(), "-c".into(), script.into()], ..Default::default() }
}

pub fn input(input: Input) -> v1::ExecInput {
    v1::ExecInput { input: Some(input) }
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit: v1::ExecExit,
    pub pid: Option<u32>,
    pub largest: usize,
}

impl Outcome {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }

    pub fn error(&self) -> String {
        String::from_utf8_lossy(&self.stderr).trim_end().to_owned()
    }
}

/// Runs a command to its end.
pub async fn run(client: &mut GuestClient<Channel>, start: v1::ExecStart) -> Result<Outcome, Status> {
    run_with(client, start, Vec::new()).await
}

pub async fn run_with(
    client: &mut GuestClient<Channel>,
    start: v1::ExecStart,
    more: Vec<Input>,
) -> Result<Outcome, Status> {
    let inputs = std::iter::once(Input::Start(start)).chain(more).map(input);
    let output = client.exec(tokio_stream::iter(inputs)).await?.into_inner();
    collect(output).await
}

pub async fn collect(mut output: tonic::Streaming<v1::ExecOutput>) -> Result<Outcome, Status> {
    let mut outcome = Outcome::default();
    while let Some(message) = output.message().await? {
        match message.output.unwrap() {
            Output::Started(started) => outcome.pid = Some(started.pid),
            Output::Stdout(bytes) => {
                outcome.largest = outcome.largest.max(bytes.len());
                outcome.stdout.extend(bytes);
            }
            Output::Stderr(bytes) => outcome.stderr.extend(bytes),
            Output::Exit(exit) => {
                outcome.exit = exit;
                assert!(output.message().await?.is_none(), "exit is the last message");
                return Ok(outcome);
            }
        }
    }
    Err(Status::data_loss("no exit"))
}

pub async fn within<T>(limit: Duration, what: impl Future<Output = T>) -> T {
    tokio::time::timeout(limit, what).await.unwrap()
}

/// Waits for something that has no event, in a test.
pub async fn until(mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(Duration::from_secs(10), wait).await;
}

/// Whether a process runs (a zombie does not).
pub fn alive(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z')
}
