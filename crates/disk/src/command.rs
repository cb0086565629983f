//! Bounded subprocesses: no shell, no standard input, one deadline, output line by line to a log and to the progress.
//!
//! For set-up and building only: nothing on the path of a sandbox request starts a process through this. It does not
//! capture unbounded output: the last lines are kept, the rest is in the log.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::progress::{Event, Progress};

/// Lines of output that are kept for the caller and for error messages.
pub const KEPT_LINES: usize = 30;
/// A line longer than this is cut, bytes.
const MAX_LINE: usize = 4096;
/// Time between asking a late program to end and ending it.
const GRACE: Duration = Duration::from_secs(5);
/// Programs of the system administrator are not on every user's PATH.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A subprocess did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The program is not installed.
    #[error("{program} is not installed: run `make setup`, or install the Debian package that has it")]
    Missing {
        /// Its name.
        program: String,
    },
    /// It could not be started or watched.
    #[error("cannot run {program}")]
    Io {
        /// Its name.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{program} failed ({status}){}", tail_text(tail, log.as_deref()))]
    Failed {
        /// Its name.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// Its last lines.
        tail: Vec<String>,
        /// The whole output, when it was logged.
        log: Option<PathBuf>,
    },
    /// It took too long and was ended.
    #[error("{program} did not end within {} s{}", limit.as_secs(), tail_text(tail, log.as_deref()))]
    TimedOut {
        /// Its name.
        program: String,
        /// The limit.
        limit: Duration,
        /// Its last lines.
        tail: Vec<String>,
        /// The whole output, when it was logged.
        log: Option<PathBuf>,
    },
}

fn tail_text(tail: &[String], log: Option<&Path>) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    if let Some(log) = log {
        // Writing to a String cannot fail.
        write!(text, "; the whole output is in {}", log.display()).unwrap_or_default();
    }
    for line in tail {
        text.push_str("\n  | ");
        text.push_str(line);
    }
    text
}

/// A command to run to its end.
#[derive(Debug)]
pub struct Command {
    program: OsString,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    limit: Duration,
    log: Option<PathBuf>,
    keep: usize,
}

impl Command {
    /// A command with a limit of 60 seconds and no log.
    #[must_use]
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().into(),
            args: Vec::new(),
            envs: Vec::new(),
            dir: None,
            limit: Duration::from_secs(60),
            log: None,
            keep: KEPT_LINES,
        }
    }

    /// Sets how many of the last lines are kept for the caller, instead of [`KEPT_LINES`].
    #[must_use]
    pub fn keep(mut self, lines: usize) -> Self {
        self.keep = lines;
        self
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().into());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().into()));
        self
    }

    /// Sets one variable of its environment, on top of ours with a C locale.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.envs.push((name.into(), value.as_ref().into()));
        self
    }

    /// Sets its working directory.
    #[must_use]
    pub fn dir(mut self, dir: impl Into<PathBuf>) -> Self {
        self.dir = Some(dir.into());
        self
    }

    /// Sets the time after which it is ended.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Appends the whole output to this file.
    #[must_use]
    pub fn log(mut self, log: impl Into<PathBuf>) -> Self {
        self.log = Some(log.into());
        self
    }

    fn name(&self) -> String {
        self.program.to_string_lossy().into_owned()
    }

    /// Runs it to its end and returns the last lines of its standard output and error, together.
    /// It stays in our process group, so Ctrl-C reaches it.
    ///
    /// # Errors
    /// [`CommandError`]; the process has then ended.
    pub fn run(self, progress: &dyn Progress) -> Result<Vec<String>, CommandError> {
        let io_error = |source: io::Error| CommandError::Io { program: self.name(), source };
        let mut sink = Sink::open(self.log.as_deref(), self.keep, progress).map_err(io_error)?;
        sink.note(&format!("$ {} {}", self.name(), self.args.join(OsStr::new(" ")).to_string_lossy()));
        let (mut running, output) = self.start()?;
        let ended = watch(&mut running, output, &mut sink, Instant::now() + self.limit).map_err(io_error)?;
        let tail: Vec<String> = sink.tail.into();
        match ended {
            Some(status) if status.success() => Ok(tail),
            Some(status) => Err(CommandError::Failed { program: self.name(), status, tail, log: self.log }),
            None => Err(CommandError::TimedOut { program: self.name(), limit: self.limit, tail, log: self.log }),
        }
    }

    fn start(&self) -> Result<(Running, PipeReader), CommandError> {
        let io_error = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => CommandError::Missing { program: self.name() },
            _ => CommandError::Io { program: self.name(), source },
        };
        let (output, stdout) = io::pipe().map_err(io_error)?;
        let stderr = stdout.try_clone().map_err(io_error)?;
        let mut command = std::process::Command::new(&self.program);
        command.args(&self.args).env("PATH", PATH).env("LC_ALL", "C.UTF-8");
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        if let Some(dir) = &self.dir {
            command.current_dir(dir);
        }
        let child = command.spawn().map_err(io_error)?;
        // Our copies of the pipe's writing end close here, so that its end is seen.
        drop(command);
        let running = Running::new(child).map_err(io_error)?;
        Ok((running, output))
    }
}

/// A child that does not outlive this value.
struct Running {
    child: Child,
    pidfd: OwnedFd,
    ended: bool,
}

impl Running {
    fn new(mut child: Child) -> io::Result<Self> {
        match rustix::process::pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { child, pidfd, ended: false }),
            Err(errno) => {
                child.kill()?;
                child.wait()?;
                Err(errno.into())
            }
        }
    }

    fn reap(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait()?;
        self.ended = true;
        Ok(status)
    }

    /// Asks it to end, gives it [`GRACE`] to clean up (mmdebstrap does), then ends it.
    fn end(&mut self) -> io::Result<()> {
        let signal = |fd: &OwnedFd, signal| match rustix::process::pidfd_send_signal(fd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(io::Error::from(errno)),
        };
        signal(&self.pidfd, Signal::TERM)?;
        if !readable(&[&self.pidfd], GRACE)?.contains(&true) {
            signal(&self.pidfd, Signal::KILL)?;
        }
        self.reap().map(drop)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended
            && let Err(error) = self.end()
        {
            tracing::warn!(%error, pid = self.child.id(), "cannot end a subprocess");
        }
    }
}

/// Which of the descriptors can be read (or are at their end), waiting at most `limit`.
fn readable(fds: &[&OwnedFd], limit: Duration) -> io::Result<Vec<bool>> {
    let mut polls: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)).collect();
    let timeout = rustix::time::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    match rustix::event::poll(&mut polls, Some(&timeout)) {
        Ok(_) => Ok(polls.iter().map(|poll| !poll.revents().is_empty()).collect()),
        Err(rustix::io::Errno::INTR) => Ok(vec![false; fds.len()]),
        Err(errno) => Err(errno.into()),
    }
}

/// Passes output on until the child ends (its status) or the deadline passes (`None`, and it was ended). A grandchild that
/// keeps the pipe open holds nothing up: when the child has ended, what is in the pipe is taken and that is all.
fn watch(
    running: &mut Running,
    output: PipeReader,
    sink: &mut Sink<'_>,
    deadline: Instant,
) -> io::Result<Option<ExitStatus>> {
    let pipe = OwnedFd::from(output);
    rustix::io::ioctl_fionbio(&pipe, true)?;
    let mut reader = File::from(pipe.try_clone()?);
    let mut open = true;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let ready = if open { readable(&[&running.pidfd, &pipe], left)? } else { readable(&[&running.pidfd], left)? };
        let ended = ready.first() == Some(&true);
        open = open && sink.drain(&mut reader)?;
        if ended {
            sink.flush_line();
            return running.reap().map(Some);
        }
        if Instant::now() >= deadline {
            running.end()?;
            sink.flush_line();
            return Ok(None);
        }
    }
}

/// Where output goes: the log, the progress, and the kept tail.
struct Sink<'a> {
    log: Option<File>,
    progress: &'a dyn Progress,
    keep: usize,
    partial: Vec<u8>,
    tail: VecDeque<String>,
}

impl<'a> Sink<'a> {
    fn open(log: Option<&Path>, keep: usize, progress: &'a dyn Progress) -> io::Result<Self> {
        let log = log.map(|path| OpenOptions::new().append(true).create(true).open(path)).transpose()?;
        Ok(Self { log, progress, keep, partial: Vec::new(), tail: VecDeque::new() })
    }

    /// A full disk under the log must not fail the work itself.
    fn write_log(&mut self, bytes: &[u8]) {
        if let Some(log) = &mut self.log
            && let Err(error) = log.write_all(bytes)
        {
            tracing::warn!(%error, "cannot write the build log; going on without it");
            self.log = None;
        }
    }

    fn note(&mut self, line: &str) {
        self.write_log(line.as_bytes());
        self.write_log(b"\n");
    }

    /// Takes all that can be read now; `false` at the end of the pipe.
    fn drain(&mut self, reader: &mut File) -> io::Result<bool> {
        let mut buffer = [0_u8; 8192];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(count) => self.take(buffer.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.write_log(bytes);
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => self.flush_line(),
                _ if self.partial.len() < MAX_LINE => self.partial.push(*byte),
                _ => {}
            }
        }
    }

    fn flush_line(&mut self) {
        if self.partial.is_empty() {
            return;
        }
        let line = String::from_utf8_lossy(&self.partial).into_owned();
        self.partial.clear();
        self.progress.report(Event::Detail { line: &line });
        if self.tail.len() >= self.keep {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quiet;

    fn sh(script: &str) -> Command {
        Command::new("sh").args(["-c", script])
    }

    #[test]
    fn output_of_both_streams_is_returned_and_logged() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let lines = sh("echo out; echo err >&2; printf last").log(&log).run(&Quiet).unwrap();
        assert_eq!(lines, ["out", "err", "last"]);
        assert!(std::fs::read_to_string(log).unwrap().ends_with("out\nerr\nlast"));
    }

    #[test]
    fn a_failure_shows_the_tail_and_the_status() {
        let error = sh("seq 100; exit 3").run(&Quiet).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("exit status: 3") && text.contains("\n  | 100"), "{text}");
        assert!(!text.contains("| 70\n"), "only the tail: {text}");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = Command::new("coppice-no-such-program").run(&Quiet).unwrap_err();
        assert!(matches!(error, CommandError::Missing { .. }), "{error}");
    }

    #[test]
    fn a_late_program_is_ended() {
        let begin = Instant::now();
        let error = sh("echo begun; exec sleep 60").limit(Duration::from_millis(300)).run(&Quiet).unwrap_err();
        assert!(matches!(&error, CommandError::TimedOut { tail, .. } if tail == &["begun"]), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipe_open_holds_nothing_up() {
        let begin = Instant::now();
        assert_eq!(sh("sleep 20 & echo done").run(&Quiet).unwrap(), ["done"]);
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
