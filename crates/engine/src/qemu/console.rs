//! The serial console: appended to a bounded file, and broadcast to followers.
//!
//! What a guest prints is bytes of a stranger: it is never interpreted here, and never grows beyond [`MAX_LOG`]. What is
//! printed while no daemon runs is lost.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tokio::fs::{File, OpenOptions};
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::broadcast;

/// Most bytes that a console log holds; when it is full its first half is dropped.
pub(crate) const MAX_LOG: u64 = 4 << 20;
/// Pieces that a slow follower may be behind before it loses some.
const FOLLOW: usize = 256;
/// Longest line that is remembered for error messages.
const MAX_LINE: usize = 200;

/// The console of one VM.
#[derive(Debug, Clone)]
pub(crate) struct Console {
    output: broadcast::Sender<Bytes>,
    last_line: Arc<Mutex<LastLine>>,
}

impl Console {
    pub fn new() -> Self {
        Self { output: broadcast::Sender::new(FOLLOW), last_line: Arc::default() }
    }

    /// Follows the console from now on.
    pub fn follow(&self) -> broadcast::Receiver<Bytes> {
        self.output.subscribe()
    }

    /// The last line that is not empty, printable characters only.
    pub fn last_line(&self) -> String {
        self.last_line.lock().map(|line| line.get()).unwrap_or_default()
    }

    /// Reads the console until it is closed.
    pub async fn run(self, mut stream: UnixStream, log: PathBuf) {
        let mut log = match Log::open(&log).await {
            Ok(log) => Some(log),
            Err(error) => {
                tracing::warn!(path = %log.display(), %error, "the console can't be logged");
                None
            }
        };
        let mut buffer = vec![0; 16 << 10];
        loop {
            let data = match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(n) => buffer.get(..n).unwrap_or_default(),
            };
            if let Ok(mut line) = self.last_line.lock() {
                line.push(data);
            }
            // No follower is fine.
            drop(self.output.send(Bytes::copy_from_slice(data)));
            if let Some(file) = &mut log
                && let Err(error) = file.append(data).await
            {
                // The host's disk may be full: the guest is not to suffer, and later output may fit again.
                tracing::debug!(%error, "console output was not logged");
            }
        }
    }
}

#[derive(Debug, Default)]
struct LastLine {
    done: String,
    current: String,
}

impl LastLine {
    fn push(&mut self, data: &[u8]) {
        for byte in data {
            match byte {
                b'\n' | b'\r' => {
                    if !self.current.trim().is_empty() {
                        self.done = std::mem::take(&mut self.current);
                    }
                    self.current.clear();
                }
                0x20..0x7f if self.current.len() < MAX_LINE => self.current.push(char::from(*byte)),
                _ => {}
            }
        }
    }

    fn get(&self) -> String {
        let line = if self.current.trim().is_empty() { &self.done } else { &self.current };
        line.trim().to_owned()
    }
}

struct Log {
    file: File,
    len: u64,
}

impl Log {
    async fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).mode(0o600).open(path).await?;
        let len = file.metadata().await?.len();
        Ok(Self { file, len })
    }

    async fn append(&mut self, data: &[u8]) -> io::Result<()> {
        let more = u64::try_from(data.len()).unwrap_or(u64::MAX);
        if self.len.saturating_add(more) > MAX_LOG {
            self.drop_first_half().await?;
        }
        self.file.write_all(data).await?;
        self.file.flush().await?;
        self.len += more;
        Ok(())
    }

    /// In place, so that who has the file open goes on with it. Memory holds half of the log for a moment.
    async fn drop_first_half(&mut self) -> io::Result<()> {
        self.file.seek(io::SeekFrom::Start(self.len.saturating_sub(MAX_LOG / 2))).await?;
        let mut kept = Vec::new();
        (&mut self.file).take(MAX_LOG / 2).read_to_end(&mut kept).await?;
        self.file.set_len(0).await?;
        self.file.write_all(&kept).await?;
        self.len = u64::try_from(kept.len()).unwrap_or(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_is_logged_followed_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        std::fs::write(&path, "before\n").unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let console = Console::new();
        let mut follower = console.follow();
        let task = tokio::spawn(console.clone().run(ours, path.clone()));
        theirs.write_all(b"hello \x1b[1m\xff\n\n").await.unwrap();
        assert_eq!(&follower.recv().await.unwrap()[..6], b"hello ");
        for _ in 0..100 {
            theirs.write_all(&[b'x'; 100_000]).await.unwrap();
        }
        theirs.write_all(b"\nthe end\n").await.unwrap();
        drop(theirs);
        task.await.unwrap();
        assert_eq!(console.last_line(), "the end");
        let log = std::fs::read(&path).unwrap();
        assert!(log.ends_with(b"\nthe end\n") && log.len() as u64 <= MAX_LOG && log.len() as u64 >= MAX_LOG / 2);
    }

    #[test]
    fn the_last_line_is_printable_and_short() {
        let mut line = LastLine::default();
        line.push(b"first\r\n\x1b\x07second");
        assert_eq!(line.get(), "second");
        line.push(b"\n   \n");
        assert_eq!(line.get(), "second");
        line.push(&[b'y'; 10_000]);
        assert_eq!(line.get().len(), MAX_LINE);
    }
}
