//! Exec: runs one command and streams its output.
//!
//! [`Running`] is a task of its own that outlives the call: it reads the pipes only when the host takes the output
//! (a chunk in hand at most, so memory is bounded and a host that does not read makes the command block on its pipe),
//! watches the timeout, and ends when the command has. When the session is lost it goes on, and the output is read and
//! dropped; when the call is cancelled the process group is killed ([`OutputStream`]).
//!
//! **When is it over?** The main process has ended, and what was in the pipes at that moment has been read: all that it
//! wrote itself. A background child that holds the pipes open does not hold the call; it gets a short grace.
//!
//! Starting processes is in [`crate::spawn`], waiting for them in [`crate::reaper`].

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    pin::Pin,
    process::Stdio,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use coppice_guest_proto::{
    limits::{CHUNK, MAX_ARGS},
    v1::{self, ExecOutput, exec_input::Input, exec_output::Output},
};
use futures::Stream;
use rustix::process::Pid;
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::unix::pipe,
    sync::{OwnedSemaphorePermit, mpsc, oneshot},
    time::sleep_until,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::{Status, Streaming};

use crate::{
    hold::Entered,
    processes::Group,
    reaper::{Exit, Spawned},
    resume::Identity,
    service::Agent,
    spawn::SpawnError,
    users::User,
};

/// After the main process has ended, a pipe that is still open is read until it has been silent for this long ...
const GRACE_SILENCE: Duration = Duration::from_millis(50);
/// ... and for this long at most.
const GRACE_TOTAL: Duration = Duration::from_millis(250);
/// With more commands than this running, each is read in [`SMALL_CHUNK`]s, to bound what 512 of them can hold.
const MANY_COMMANDS: usize = 64;
const SMALL_CHUNK: usize = 8 << 10;
/// A command that writes in small pieces would be interrupted for each of them, which costs more than the piece. So after
/// one of fewer bytes than this ...
const SMALL_PIECE: usize = 16 << 10;
/// ... the next is read a moment later, with what has come by then. The first is never delayed, nor is the end.
const GATHER: Duration = Duration::from_millis(1);
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What a shell answers when a command isn't found, and when it can't be executed.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

/// Starts the command of a call. What can be refused before anything runs is an error here.
pub(crate) async fn exec(
    agent: &std::sync::Arc<Agent>,
    session: &CancellationToken,
    identity: &Identity,
    mut input: Streaming<v1::ExecInput>,
) -> Result<impl Stream<Item = Result<ExecOutput, Status>> + use<>, Status> {
    let start = match input.message().await?.and_then(|message| message.input) {
        Some(Input::Start(start)) => start,
        _ => return Err(Status::invalid_argument("the first message of Exec must be `start`")),
    };
    check(&start)?;
    let permit = agent
        .commands
        .clone()
        .try_acquire_owned()
        .map_err(|_| Status::resource_exhausted("too many commands are running in the sandbox"))?;
    let prepared = {
        let (root, identity) = (agent.system.root().to_owned(), identity.env.clone());
        agent.blocking(move || prepare(&root, &identity, start)).await?
    };
    let (output, rx) = mpsc::channel(1);
    let cancel = CancellationToken::new();
    let (started, outcome) = oneshot::channel();
    let stream = OutputStream { rx, session: session.clone(), cancel: cancel.clone() };
    // While the machine's processes are held, before the command is one: in a copy it is then dropped with the session.
    let entered = agent.hold.enter().await;
    // From here on the command belongs to its own task: this call may be dropped at any await.
    tokio::spawn(run(agent.clone(), prepared, Call { input, output, cancel, started, entered, _permit: permit }));
    outcome.await.map_err(|_| Status::internal("the command could not be started"))??;
    Ok(stream)
}

/// The output as the session sees it. Dropping it cancels the command, unless it is dropped because the session is gone.
struct OutputStream {
    rx: mpsc::Receiver<Result<ExecOutput, Status>>,
    session: CancellationToken,
    cancel: CancellationToken,
}

impl Stream for OutputStream {
    type Item = Result<ExecOutput, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.rx.poll_recv(cx)
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        if !self.session.is_cancelled() {
            self.cancel.cancel();
        }
    }
}

fn check(start: &v1::ExecStart) -> Result<(), Status> {
    if start.argv.first().is_none_or(String::is_empty) {
        return Err(Status::invalid_argument("argv is empty"));
    }
    if start.argv.iter().chain(start.env.values()).any(|text| text.contains('\0')) {
        return Err(Status::invalid_argument("an argument or an environment variable contains a NUL byte"));
    }
    if let Some(bad) = start.env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return Err(Status::invalid_argument(format!("{bad:?} is not a name of an environment variable")));
    }
    let argv: usize = start.argv.iter().map(|arg| arg.len() + 1).sum();
    let env: usize = start.env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    if argv + env > MAX_ARGS {
        return Err(Status::invalid_argument(format!("arguments and environment exceed {MAX_ARGS} bytes")));
    }
    Ok(())
}

/// A command whose user and directory are known.
struct Prepared {
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    dir: PathBuf,
    user: User,
    stdin: bool,
    timeout: Option<Duration>,
}

fn prepare(root: &Path, identity: &BTreeMap<String, String>, start: v1::ExecStart) -> Result<Prepared, Status> {
    let user = crate::users::find(root, &start.user)?;
    let me = rustix::process::geteuid();
    if !me.is_root() && user.uid != me && !start.user.is_empty() {
        return Err(Status::permission_denied("the agent does not run as root and can't switch users"));
    }
    let dir = if start.cwd.is_empty() {
        let home = crate::status::check_path(root, &user.home.to_string_lossy())?;
        if home.is_dir() { home } else { root.to_owned() }
    } else {
        let dir = crate::status::check_path(root, &start.cwd)?;
        if !dir.is_dir() {
            return Err(Status::invalid_argument(format!("the working directory {:?} does not exist", start.cwd)));
        }
        dir
    };
    let mut env = identity.clone();
    env.extend([
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), user.home.to_string_lossy().into_owned()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
        ("LANG".to_owned(), "C.UTF-8".to_owned()),
        ("TERM".to_owned(), "dumb".to_owned()),
    ]);
    env.extend(start.env);
    let timeout = (start.timeout_ms > 0).then(|| Duration::from_millis(start.timeout_ms));
    Ok(Prepared { argv: start.argv, env, dir, user, stdin: start.stdin, timeout })
}

/// The host's side of a command.
struct Call {
    input: Streaming<v1::ExecInput>,
    output: mpsc::Sender<Result<ExecOutput, Status>>,
    cancel: CancellationToken,
    started: oneshot::Sender<Result<(), Status>>,
    /// Until it has been started.
    entered: Entered,
    _permit: OwnedSemaphorePermit,
}

async fn run(agent: std::sync::Arc<Agent>, prepared: Prepared, call: Call) {
    let begun = Instant::now();
    let (stdin_wanted, timeout) = (prepared.stdin, prepared.timeout);
    let program = prepared.argv.first().cloned().unwrap_or_default();
    let spawning = agent.clone();
    let spawned = tokio::task::spawn_blocking(move || spawn(&spawning, prepared)).await;
    drop(call.entered);
    let (result, spawned) = match spawned {
        Ok(Ok(spawned)) => (Ok(()), Some(spawned)),
        Ok(Err(SpawnError::Exec(error))) => {
            call.started.send(Ok(())).ok();
            return refuse(&call.output, &program, &error, begun).await;
        }
        Ok(Err(SpawnError::Setup(error))) => (Err(crate::status::from_io(&"can't start the command", &error)), None),
        Err(error) => (Err(Status::internal(format!("the agent failed: {error}"))), None),
    };
    // Whether the call is still there shows when output is sent.
    call.started.send(result).ok();
    let Some(spawned) = spawned else { return };
    let pid = spawned.pid;
    let chunk = if agent.running_commands() > MANY_COMMANDS { SMALL_CHUNK } else { CHUNK };
    let running = match Running::new(&agent, spawned, call.input, stdin_wanted, call.output, begun, timeout, chunk) {
        Ok(running) => running,
        Err(error) => {
            tracing::error!("can't watch the pipes of a command: {error}");
            return agent.reaper.kill_group(pid);
        }
    };
    running.drive(call.cancel).await;
}

fn spawn(agent: &Agent, prepared: Prepared) -> Result<Spawned, SpawnError> {
    let argv = prepared.argv.iter().map(String::as_str);
    let door = agent.system.door(Group::Commands)?;
    let mut command = crate::spawn::command(argv, prepared.env, &prepared.dir, Some(&prepared.user), door)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if prepared.stdin {
        command.stdin(Stdio::piped());
    }
    agent.reaper.spawn(&mut command).map_err(SpawnError::from)
}

/// Ends a call whose program can't be executed as a shell would.
async fn refuse(output: &mpsc::Sender<Result<ExecOutput, Status>>, program: &str, error: &io::Error, begun: Instant) {
    let (code, why) = match error.raw_os_error() {
        Some(libc::ENOENT) => (NOT_FOUND, "not found".to_owned()),
        _ => (NOT_EXECUTABLE, error.to_string()),
    };
    let message = format!("{program}: {why}\n");
    for part in [Output::Stderr(message.into_bytes()), exit_message(Exit { code, signal: 0 }, false, begun)] {
        if output.send(Ok(ExecOutput { output: Some(part) })).await.is_err() {
            return;
        }
    }
}

fn exit_message(exit: Exit, timed_out: bool, begun: Instant) -> Output {
    Output::Exit(v1::ExecExit {
        exit_code: exit.code,
        signal: exit.signal,
        timed_out,
        duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
    })
}

/// Which pipe.
#[derive(Clone, Copy)]
enum Source {
    Stdout,
    Stderr,
}

/// An output pipe of the command.
struct Reading {
    pipe: Option<pipe::Receiver>,
    /// Once the main process has ended: bytes that were in the pipe then and are still to be read.
    owed: usize,
}

impl Reading {
    fn new(fd: Option<OwnedFd>) -> io::Result<Self> {
        Ok(Self { pipe: fd.map(pipe::Receiver::from_owned_fd).transpose()?, owed: 0 })
    }

    /// Resolves when there is something to read, or the end. Never, if the pipe is closed.
    async fn readable(&self) -> io::Result<()> {
        match &self.pipe {
            Some(pipe) => pipe.ready(Interest::READABLE).await.map(drop),
            None => std::future::pending().await,
        }
    }

    /// A chunk, if there is one now. Closes the pipe at its end.
    fn read(&mut self, buffer: &mut [u8]) -> Option<Vec<u8>> {
        let result = self.pipe.as_ref()?.try_read(buffer);
        match result {
            Ok(n) if n > 0 => {
                self.owed = self.owed.saturating_sub(n);
                Some(buffer.get(..n)?.to_vec())
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
            Ok(_) | Err(_) => {
                self.pipe = None;
                self.owed = 0;
                None
            }
        }
    }

    /// The main process has ended: what it wrote is in the pipe now.
    fn settle(&mut self) {
        let waiting = self.pipe.as_ref().map(|pipe| rustix::io::ioctl_fionread(pipe.as_fd()));
        self.owed = waiting.and_then(Result::ok).and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
    }
}

/// How a command has ended, and until when its pipes are still read.
struct Ended {
    exit: Exit,
    /// The end of the grace for what background children write; starts once nothing is owed.
    grace: Option<tokio::time::Instant>,
}

/// A command that has been started.
struct Running<'a> {
    agent: &'a Agent,
    pid: Pid,
    stdout: Reading,
    stderr: Reading,
    exit: Option<oneshot::Receiver<Exit>>,
    ended: Option<Ended>,
    /// `None` once nobody listens.
    output: Option<mpsc::Sender<Result<ExecOutput, Status>>>,
    /// Waits until the host takes it; nothing is read meanwhile.
    in_hand: Option<Output>,
    /// Resolves with an error in the input.
    input: Option<AbortOnDropHandle<Status>>,
    deadline: Option<tokio::time::Instant>,
    /// Nothing is read before; see [`GATHER`].
    gather: Option<tokio::time::Instant>,
    timed_out: bool,
    begun: Instant,
    buffer: Vec<u8>,
}

/// What happened next.
enum Event {
    Readable(Source),
    Exited(Option<Exit>),
    Timeout,
    Cancelled,
    BadInput(Status),
    Taken,
    Gathered,
    Over,
}

impl<'a> Running<'a> {
    #[expect(clippy::too_many_arguments, reason = "the parts of a command that its task takes over, each used once")]
    fn new(
        agent: &'a Agent,
        spawned: Spawned,
        input: Streaming<v1::ExecInput>,
        stdin_wanted: bool,
        output: mpsc::Sender<Result<ExecOutput, Status>>,
        begun: Instant,
        timeout: Option<Duration>,
        chunk: usize,
    ) -> io::Result<Self> {
        let stdin = spawned.stdin.map(pipe::Sender::from_owned_fd).transpose()?;
        let started = v1::ExecStarted { pid: u32::try_from(spawned.pid.as_raw_nonzero().get()).unwrap_or_default() };
        Ok(Self {
            agent,
            pid: spawned.pid,
            stdout: Reading::new(spawned.stdout)?,
            stderr: Reading::new(spawned.stderr)?,
            exit: Some(spawned.exit),
            ended: None,
            output: Some(output),
            in_hand: Some(Output::Started(started)),
            input: Some(AbortOnDropHandle::new(tokio::spawn(feed(input, stdin, stdin_wanted)))),
            // A deadline beyond what the clock can hold is none.
            deadline: timeout.and_then(|t| tokio::time::Instant::from_std(begun).checked_add(t)),
            gather: None,
            timed_out: false,
            begun,
            buffer: vec![0; chunk],
        })
    }

    /// Runs until the command is over and the host has its exit.
    async fn drive(mut self, cancel: CancellationToken) {
        let mut cancelled = false;
        loop {
            match self.next(&cancel, cancelled).await {
                Event::Readable(source) => self.read(source),
                Event::Exited(exit) => self.main_ended(exit),
                Event::Timeout => {
                    self.deadline = None;
                    self.timed_out = true;
                    self.agent.reaper.kill_group(self.pid);
                }
                Event::Cancelled => {
                    cancelled = true;
                    self.discard();
                    self.agent.reaper.kill_group(self.pid);
                }
                Event::BadInput(status) => {
                    self.agent.reaper.kill_group(self.pid);
                    if let Some(output) = self.output.take() {
                        // Bounded: the call ends with this message, and the host takes it or goes away.
                        tokio::spawn(async move { output.send(Err(status)).await });
                    }
                    self.discard();
                }
                Event::Taken => {}
                Event::Gathered => self.gather = None,
                Event::Over => break,
            }
        }
        if let (Some(output), Some(ended)) = (&self.output, &self.ended) {
            let exit = exit_message(ended.exit, self.timed_out, self.begun);
            tokio::select! {
                // An error: the host has gone away.
                _ = output.send(Ok(ExecOutput { output: Some(exit) })) => {}
                () = cancel.cancelled() => {}
            }
        }
    }

    async fn next(&mut self, cancel: &CancellationToken, cancelled: bool) -> Event {
        let reading = self.in_hand.is_none();
        if self.ended.is_some() && reading {
            if self.stdout.pipe.is_none() && self.stderr.pipe.is_none() {
                return Event::Over;
            }
            self.start_grace();
        }
        let grace = self.ended.as_ref().and_then(|ended| ended.grace);
        let silence = tokio::time::Instant::now() + GRACE_SILENCE;
        let (settled, reading) = (reading, reading && self.gather.is_none());
        tokio::select! {
            biased;
            () = cancel.cancelled(), if !cancelled => Event::Cancelled,
            () = at(self.deadline), if self.ended.is_none() => Event::Timeout,
            exit = wait(&mut self.exit) => Event::Exited(exit),
            status = input_error(&mut self.input) => Event::BadInput(status),
            () = give(&mut self.output, &mut self.in_hand), if !settled => Event::Taken,
            () = at(self.gather), if settled => Event::Gathered,
            _ = self.stdout.readable(), if reading => Event::Readable(Source::Stdout),
            _ = self.stderr.readable(), if reading => Event::Readable(Source::Stderr),
            () = at(grace.map(|grace| grace.min(silence))), if reading => Event::Over,
        }
    }

    fn start_grace(&mut self) {
        if self.stdout.owed + self.stderr.owed == 0
            && let Some(ended) = &mut self.ended
        {
            ended.grace.get_or_insert_with(|| tokio::time::Instant::now() + GRACE_TOTAL);
        }
    }

    fn read(&mut self, source: Source) {
        let (pipe, wrap): (_, fn(Vec<u8>) -> Output) = match source {
            Source::Stdout => (&mut self.stdout, Output::Stdout),
            Source::Stderr => (&mut self.stderr, Output::Stderr),
        };
        let Some(bytes) = pipe.read(&mut self.buffer) else { return };
        if self.ended.is_none() && bytes.len() < SMALL_PIECE {
            self.gather = Some(tokio::time::Instant::now() + GATHER);
        }
        if self.output.is_some() {
            self.in_hand = Some(wrap(bytes));
        }
    }

    fn main_ended(&mut self, exit: Option<Exit>) {
        // The reaper answers for every child that it started, unless the agent is ending.
        let exit = exit.unwrap_or(Exit { code: 128 + libc::SIGKILL, signal: libc::SIGKILL });
        self.stdout.settle();
        self.stderr.settle();
        self.exit = None;
        self.input = None;
        self.gather = None;
        self.ended = Some(Ended { exit, grace: None });
    }

    /// Nobody listens any more: output is read and dropped from now on.
    fn discard(&mut self) {
        self.output = None;
        self.in_hand = None;
        self.input = None;
    }
}

async fn at(time: Option<tokio::time::Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn wait(exit: &mut Option<oneshot::Receiver<Exit>>) -> Option<Exit> {
    match exit {
        Some(exit) => exit.await.ok(),
        None => std::future::pending().await,
    }
}

async fn input_error(input: &mut Option<AbortOnDropHandle<Status>>) -> Status {
    match input {
        Some(task) => task.await.unwrap_or_else(|e| Status::internal(format!("the agent failed: {e}"))),
        None => std::future::pending().await,
    }
}

/// Gives what is in hand to the host, when it takes it. Cancel-safe: nothing is lost before the host has room.
async fn give(output: &mut Option<mpsc::Sender<Result<ExecOutput, Status>>>, in_hand: &mut Option<Output>) {
    let Some(sender) = output else {
        *in_hand = None;
        return;
    };
    let taken = match sender.reserve().await {
        Ok(room) => {
            if let Some(part) = in_hand.take() {
                room.send(Ok(ExecOutput { output: Some(part) }));
            }
            true
        }
        Err(_) => false,
    };
    if !taken {
        *output = None;
        *in_hand = None;
    }
}

/// Writes the input of the call to the command. Returns only for an error of the host's; else it waits to be aborted.
async fn feed(mut input: Streaming<v1::ExecInput>, mut stdin: Option<pipe::Sender>, wanted: bool) -> Status {
    loop {
        match input.message().await {
            Ok(Some(v1::ExecInput { input: Some(Input::Stdin(bytes)) })) => {
                if !wanted {
                    return Status::invalid_argument("`stdin` was sent to a command that was started without it");
                }
                if let Some(pipe) = &mut stdin
                    && pipe.write_all(&bytes).await.is_err()
                {
                    // The command has closed its input; what still comes is read and dropped.
                    stdin = None;
                }
            }
            Ok(Some(v1::ExecInput { input: Some(Input::StdinClose(_)) })) => stdin = None,
            Ok(Some(v1::ExecInput { input: Some(Input::Start(_)) })) => {
                return Status::invalid_argument("`start` was sent twice");
            }
            Ok(Some(v1::ExecInput { input: None })) => {}
            // The end of the input, or of the session: the command sees the end of its own.
            Ok(None) | Err(_) => {
                drop(stdin.take());
                std::future::pending::<()>().await;
            }
        }
    }
}
