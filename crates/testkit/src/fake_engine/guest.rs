//! What runs "in" a fake VM: files by path, a shell of few words, and the guest protocol.
//!
//! The shell knows `echo TEXT…`, `cat PATH…`, `sleep SECONDS`, `exit CODE`, `true`, `false`, `sync`, `hostname`, `rm [-rf] PATH…`,
//! `> PATH` and `>> PATH` at the end of a command, and `;` and `&&` between commands. Anything else is "not found", 127.
//! What the handshake set is in `/run/hostname` and `/run/ip`; the ports that it says are listened on are lines of
//! `/run/ports`: `PORT [loopback]`.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use coppice_guest_proto::limits;
use coppice_guest_proto::session::{Hello, PREAMBLE_LEN, Welcome};
use coppice_guest_proto::v1::guest_server::{Guest, GuestServer};
use coppice_guest_proto::v1::{
    DirEntries, DirEntry, ExecExit, ExecInput, ExecOutput, FileChunk, FileType, HoldReply, HoldRequest, InfoReply,
    InfoRequest, ListDirRequest, ListPortsReply, ListPortsRequest, ListeningPort, QuiesceReply, QuiesceRequest,
    ReadFileRequest, ReleaseReply, ReleaseRequest, RemoveReply, RemoveRequest, ResumeReply, ResumeRequest, StatRequest,
    ThawReply, ThawRequest, WriteFileInput, WriteFileReply, exec_input, exec_output, write_file_input,
};
use futures::{Stream, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tonic::{Request, Response, Status, Streaming};

use super::vm::Machine;

/// Files of a machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    pub disk: BTreeMap<String, Vec<u8>>,
    pub memory: BTreeMap<String, Vec<u8>>,
    pub disk_path: PathBuf,
}

/// What a fake disk file begins with. Other files (a real root file system) are disks without files.
const MAGIC: &[u8; 8] = b"fakedisk";

impl Files {
    pub fn load_disk(path: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
        load(path).map(Option::unwrap_or_default)
    }

    pub fn load_memory(path: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
        load(path)?.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    pub fn save_memory(&self, path: &Path, len: u64) -> io::Result<()> {
        save(path, &self.memory)?.set_len(len)
    }

    fn place(&mut self, path: &str) -> &mut BTreeMap<String, Vec<u8>> {
        if ["/run/", "/dev/shm/", "/tmp/"].iter().any(|dir| path.starts_with(dir)) {
            &mut self.memory
        } else {
            &mut self.disk
        }
    }

    fn get(&self, path: &str) -> Option<&Vec<u8>> {
        self.memory.get(path).or_else(|| self.disk.get(path))
    }

    fn put(&mut self, path: &str, data: Vec<u8>) -> io::Result<()> {
        self.place(path).insert(path.to_owned(), data);
        self.flush()
    }

    fn flush(&self) -> io::Result<()> {
        save(&self.disk_path, &self.disk).map(drop)
    }

    fn below(&self, dir: &str) -> Vec<String> {
        let prefix = format!("{}/", dir.trim_end_matches('/'));
        self.disk.keys().chain(self.memory.keys()).filter(|p| p.starts_with(&prefix)).cloned().collect()
    }

    fn remove(&mut self, path: &str) -> bool {
        let mut gone = self.below(path);
        gone.push(path.to_owned());
        gone.iter().filter(|p| self.place(p).remove(*p).is_some()).count() > 0
    }
}

fn load(path: &Path) -> io::Result<Option<BTreeMap<String, Vec<u8>>>> {
    let mut file = std::fs::File::open(path)?;
    let mut head = [0; 16];
    if file.read_exact(&mut head).is_err() || head[..8] != *MAGIC {
        return Ok(None);
    }
    let mut len = [0; 8];
    len.copy_from_slice(&head[8..]);
    let mut json = Vec::new();
    file.take(u64::from_le_bytes(len)).read_to_end(&mut json)?;
    Ok(Some(serde_json::from_slice(&json)?))
}

/// Written over what is there; the file keeps its length when that is longer, as a disk does.
fn save(path: &Path, files: &BTreeMap<String, Vec<u8>>) -> io::Result<std::fs::File> {
    let json = serde_json::to_vec(files)?;
    let mut file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    file.write_all(MAGIC)?;
    file.write_all(&u64::try_from(json.len()).unwrap_or(0).to_le_bytes())?;
    file.write_all(&json)?;
    Ok(file)
}

/// Serves one stream: preamble, then the protocol, until the stream is cut.
pub(crate) async fn serve(machine: Arc<Machine>, mut stream: DuplexStream) {
    let mut hello = [0; PREAMBLE_LEN];
    if stream.read_exact(&mut hello).await.is_err() {
        return;
    }
    if machine.is_mute() {
        // The stream is held open, and never answered.
        return std::future::pending().await;
    }
    machine.running().await;
    let Ok(hello) = Hello::decode(&hello) else { return };
    if stream.write_all(&Welcome { session: hello.session }.encode()).await.is_err() {
        return;
    }
    let service = GuestServer::new(Service { machine }).max_decoding_message_size(limits::MAX_MESSAGE);
    let incoming = futures::stream::iter([Ok::<_, io::Error>(stream)]).chain(futures::stream::pending());
    let server = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
    if let Err(error) = server.await {
        tracing::debug!(%error, "the fake guest's server ended");
    }
}

struct Service {
    machine: Arc<Machine>,
}

type Output<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn stream<T: Send + 'static>(items: Vec<T>) -> Response<Output<T>> {
    Response::new(Box::pin(futures::stream::iter(items.into_iter().map(Ok))))
}

impl Service {
    /// Every call waits for the virtual CPUs, and for the handshake.
    async fn ready(&self) -> Result<(), Status> {
        self.machine.running().await;
        let resumed = self.machine.resumed.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        if resumed { Ok(()) } else { Err(Status::failed_precondition("no resume handshake yet")) }
    }

    fn entry(&self, path: &str) -> Option<DirEntry> {
        let files = self.machine.files();
        let name = path.rsplit('/').next().unwrap_or_default().as_bytes().to_vec();
        let of =
            |r#type: FileType, size, mode| DirEntry { name, r#type: r#type.into(), size, mode, ..DirEntry::default() };
        match files.get(path) {
            Some(data) => Some(of(FileType::Regular, u64::try_from(data.len()).unwrap_or(0), 0o644)),
            None if path == "/" || !files.below(path).is_empty() => Some(of(FileType::Directory, 0, 0o755)),
            None => None,
        }
    }
}

fn no_such(path: &str) -> Status {
    Status::not_found(format!("{path}: no such file or directory"))
}

#[tonic::async_trait]
impl Guest for Service {
    type ExecStream = Output<ExecOutput>;
    type ReadFileStream = Output<FileChunk>;
    type ListDirStream = Output<DirEntries>;

    async fn resume(&self, request: Request<ResumeRequest>) -> Result<Response<ResumeReply>, Status> {
        self.machine.running().await;
        let request = request.into_inner();
        if self.machine.refuses_resume() {
            return Err(Status::internal("the script says so"));
        }
        if request.generation.len() != 16 || request.entropy.len() < limits::MIN_ENTROPY {
            return Err(Status::invalid_argument("generation or entropy"));
        }
        *self.machine.resumed.lock().unwrap_or_else(PoisonError::into_inner) = Some(request.generation.clone());
        if !request.hostname.is_empty() {
            let mut files = self.machine.files();
            files.memory.insert("/run/hostname".to_owned(), format!("{}\n", request.hostname).into_bytes());
        }
        if let Some(net) = &request.net {
            self.machine.files().memory.insert("/run/ip".to_owned(), format!("{}\n", net.ip).into_bytes());
        }
        Ok(Response::new(ResumeReply { generation: request.generation, took_us: 1, ..ResumeReply::default() }))
    }

    async fn info(&self, _: Request<InfoRequest>) -> Result<Response<InfoReply>, Status> {
        self.machine.running().await;
        let generation = self.machine.resumed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let reply = InfoReply {
            agent_version: "fake".to_owned(),
            kernel_release: "fake".to_owned(),
            generation: generation.unwrap_or_default(),
            ..InfoReply::default()
        };
        Ok(Response::new(reply))
    }

    async fn exec(&self, request: Request<Streaming<ExecInput>>) -> Result<Response<Self::ExecStream>, Status> {
        self.ready().await?;
        let mut input = request.into_inner();
        let Some(ExecInput { input: Some(exec_input::Input::Start(start)) }) = input.message().await? else {
            return Err(Status::invalid_argument("the first message must be `start`"));
        };
        let line = match start.argv.as_slice() {
            [] => return Err(Status::invalid_argument("argv is empty")),
            [shell, flag, line] if shell.ends_with("sh") && flag == "-c" => line.clone(),
            argv => argv.join(" "),
        };
        let begin = Instant::now();
        let run = shell(&self.machine, &line);
        let (stdout, stderr, code, timed_out) = if start.timeout_ms == 0 {
            let (out, err, code) = run.await;
            (out, err, code, false)
        } else {
            match tokio::time::timeout(Duration::from_millis(start.timeout_ms), run).await {
                Ok((out, err, code)) => (out, err, code, false),
                Err(_elapsed) => (Vec::new(), Vec::new(), 137, true),
            }
        };
        let exit = ExecExit {
            exit_code: code,
            signal: if timed_out { 9 } else { 0 },
            timed_out,
            duration_ms: u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        let mut output = Vec::new();
        output.extend(stdout.chunks(limits::CHUNK).map(|c| exec_output::Output::Stdout(c.to_vec())));
        output.extend(stderr.chunks(limits::CHUNK).map(|c| exec_output::Output::Stderr(c.to_vec())));
        output.push(exec_output::Output::Exit(exit));
        Ok(stream(output.into_iter().map(|output| ExecOutput { output: Some(output) }).collect()))
    }

    async fn read_file(&self, request: Request<ReadFileRequest>) -> Result<Response<Self::ReadFileStream>, Status> {
        self.ready().await?;
        let request = request.into_inner();
        let data = self.machine.files().get(&request.path).cloned().ok_or_else(|| no_such(&request.path))?;
        let size = u64::try_from(data.len()).unwrap_or(0);
        let offset = usize::try_from(request.offset).unwrap_or(usize::MAX).min(data.len());
        let length =
            if request.length == 0 { usize::MAX } else { usize::try_from(request.length).unwrap_or(usize::MAX) };
        let wanted = data.get(offset..offset.saturating_add(length).min(data.len())).unwrap_or_default();
        let mut chunks = vec![FileChunk { data: Vec::new(), size }];
        chunks.extend(wanted.chunks(limits::CHUNK).map(|c| FileChunk { data: c.to_vec(), size: 0 }));
        Ok(stream(chunks))
    }

    async fn write_file(
        &self,
        request: Request<Streaming<WriteFileInput>>,
    ) -> Result<Response<WriteFileReply>, Status> {
        self.ready().await?;
        let mut input = request.into_inner();
        let mut path = None;
        let (mut data, mut complete) = (Vec::new(), false);
        while let Some(message) = input.message().await? {
            match message.input {
                Some(write_file_input::Input::End(_)) => complete = true,
                Some(write_file_input::Input::Start(start)) => path = Some(start.path),
                Some(write_file_input::Input::Data(chunk)) => data.extend(chunk),
                None => {}
            }
        }
        let path = path.ok_or_else(|| Status::invalid_argument("no `start`"))?;
        if !complete {
            return Err(Status::aborted("the sender broke off"));
        }
        let bytes = u64::try_from(data.len()).unwrap_or(0);
        self.machine.files().put(&path, data).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(WriteFileReply { bytes }))
    }

    async fn list_dir(&self, request: Request<ListDirRequest>) -> Result<Response<Self::ListDirStream>, Status> {
        self.ready().await?;
        let path = request.into_inner().path;
        let dir = format!("{}/", path.trim_end_matches('/'));
        let mut children: Vec<String> = self.machine.files().below(&path);
        children = children
            .iter()
            .filter_map(|p| p.strip_prefix(&dir)?.split('/').next().map(|n| format!("{dir}{n}")))
            .collect();
        children.sort();
        children.dedup();
        if children.is_empty() && path != "/" {
            return Err(no_such(&path));
        }
        Ok(stream(vec![DirEntries { entries: children.iter().filter_map(|p| self.entry(p)).collect() }]))
    }

    async fn stat(&self, request: Request<StatRequest>) -> Result<Response<DirEntry>, Status> {
        self.ready().await?;
        let path = request.into_inner().path;
        self.entry(&path).map(Response::new).ok_or_else(|| no_such(&path))
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Result<Response<RemoveReply>, Status> {
        self.ready().await?;
        let path = request.into_inner().path;
        let mut files = self.machine.files();
        if !files.remove(&path) {
            return Err(no_such(&path));
        }
        files.flush().map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(RemoveReply {}))
    }

    async fn list_ports(&self, _: Request<ListPortsRequest>) -> Result<Response<ListPortsReply>, Status> {
        self.ready().await?;
        let text = self.machine.files().get("/run/ports").cloned().unwrap_or_default();
        let port = |line: &str| {
            let mut words = line.split_whitespace();
            let port = words.next()?.parse().ok()?;
            Some(ListeningPort { port, loopback_only: words.next() == Some("loopback"), process: "fake".to_owned() })
        };
        let ports = String::from_utf8_lossy(&text).lines().filter_map(port).collect();
        Ok(Response::new(ListPortsReply { ports, truncated: false }))
    }

    async fn quiesce(&self, _: Request<QuiesceRequest>) -> Result<Response<QuiesceReply>, Status> {
        self.ready().await?;
        if self.machine.fails_quiesce() {
            return Err(Status::deadline_exceeded("the script says so"));
        }
        self.machine.frozen.store(true, Ordering::Relaxed);
        Ok(Response::new(QuiesceReply { frozen: true }))
    }

    async fn thaw(&self, _: Request<ThawRequest>) -> Result<Response<ThawReply>, Status> {
        self.ready().await?;
        Ok(Response::new(ThawReply { was_frozen: self.machine.frozen.swap(false, Ordering::Relaxed) }))
    }

    async fn hold(&self, _: Request<HoldRequest>) -> Result<Response<HoldReply>, Status> {
        self.ready().await?;
        if self.machine.frozen.load(Ordering::Relaxed) {
            return Err(Status::aborted("not every process stood still: the disk is frozen"));
        }
        Ok(Response::new(HoldReply {}))
    }

    async fn release(&self, _: Request<ReleaseRequest>) -> Result<Response<ReleaseReply>, Status> {
        self.ready().await?;
        Ok(Response::new(ReleaseReply { was_held: true }))
    }
}

/// Runs a line; answers with stdout, stderr, exit code.
async fn shell(machine: &Machine, line: &str) -> (Vec<u8>, Vec<u8>, i32) {
    let (mut stdout, mut stderr, mut code) = (Vec::new(), Vec::new(), 0);
    for command in line.split(';') {
        for step in command.split("&&") {
            let (out, err, exit) = one(machine, step.trim()).await;
            stdout.extend(out);
            stderr.extend(err);
            code = exit;
            if step.trim_start().starts_with("exit") {
                return (stdout, stderr, code);
            }
            if code != 0 {
                break;
            }
        }
    }
    (stdout, stderr, code)
}

async fn one(machine: &Machine, step: &str) -> (Vec<u8>, Vec<u8>, i32) {
    machine.running().await;
    let (command, target, append) = match (step.split_once(">>"), step.split_once('>')) {
        (Some((command, path)), _) => (command, Some(path.trim()), true),
        (_, Some((command, path))) => (command, Some(path.trim()), false),
        _ => (step, None, false),
    };
    let words: Vec<&str> = command.split_whitespace().map(|w| w.trim_matches(['"', '\''])).collect();
    let (name, rest) = words.split_first().map_or(("true", &[][..]), |(n, r)| (n.rsplit('/').next().unwrap_or(n), r));
    let (out, err, code) = match (name, rest) {
        ("true" | "sync", _) => (Vec::new(), Vec::new(), 0),
        ("false", _) => (Vec::new(), Vec::new(), 1),
        ("exit", rest) => (Vec::new(), Vec::new(), rest.first().and_then(|c| c.parse().ok()).unwrap_or(0)),
        ("echo", rest) => (format!("{}\n", rest.join(" ")).into_bytes(), Vec::new(), 0),
        ("sleep", rest) => {
            let seconds = rest.first().and_then(|s| s.parse().ok()).unwrap_or(0.0);
            tokio::time::sleep(Duration::try_from_secs_f64(seconds).unwrap_or_default()).await;
            (Vec::new(), Vec::new(), 0)
        }
        ("hostname", _) => cat(machine, &["/run/hostname"]),
        ("cat", paths) => cat(machine, paths),
        ("rm", paths) => {
            let mut files = machine.files();
            for path in paths.iter().filter(|p| !p.starts_with('-')) {
                files.remove(path);
            }
            (Vec::new(), Vec::new(), i32::from(files.flush().is_err()))
        }
        (name, _) => (Vec::new(), format!("sh: {name}: not found\n").into_bytes(), 127),
    };
    let Some(path) = target else { return (out, err, code) };
    let mut files = machine.files();
    let mut data = if append { files.get(path).cloned().unwrap_or_default() } else { Vec::new() };
    data.extend(out);
    match files.put(path, data) {
        Ok(()) => (Vec::new(), err, code),
        Err(error) => (Vec::new(), error.to_string().into_bytes(), 1),
    }
}

fn cat(machine: &Machine, paths: &[&str]) -> (Vec<u8>, Vec<u8>, i32) {
    let files = machine.files();
    let (mut out, mut err, mut code) = (Vec::new(), Vec::new(), 0);
    for path in paths {
        match files.get(path) {
            Some(data) => out.extend_from_slice(data),
            None => {
                err.extend(format!("cat: {path}: No such file or directory\n").into_bytes());
                code = 1;
            }
        }
    }
    (out, err, code)
}
