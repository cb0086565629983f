//! Frames on a stream socket: a length, a message, and the descriptors that belong to it.
//!
//! ```text
//! | length of the message, u32 little-endian | number of descriptors, u8 | 3 zero bytes | message |
//! ```
//!
//! The descriptors travel with the first byte of their frame (the kernel never merges bytes across such a message), so a
//! receiver that reads headers and messages apart knows which frame they belong to. Length and number are bounded before
//! anything is allocated. Whatever does not fit this picture is a [`FrameError`]; there is no way back into step after
//! one, so the connection ends. What a message means is not known here (`message.rs`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Longest message, bytes.
pub(crate) const MAX_MESSAGE: usize = 1 << 20;
/// Most descriptors with one message.
pub(crate) const MAX_FDS: usize = 16;

const HEADER: usize = 8;
const CONTROL: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Why there is no further frame.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The other side is gone, between two frames.
    #[error("the other side closed the connection")]
    Closed,
    /// The other side is gone in the middle of a frame, or the socket failed.
    #[error("the connection broke")]
    Io(#[source] io::Error),
    /// Not a frame.
    #[error("what came is no frame: {0}")]
    Malformed(&'static str),
}

impl From<Errno> for FrameError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// What one side sent in one piece.
#[derive(Debug)]
pub(crate) struct Frame {
    pub message: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Sends a frame. Blocking.
pub(crate) fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrameError> {
    if message.len() > MAX_MESSAGE {
        return Err(FrameError::Malformed("the message is too long"));
    }
    if fds.len() > MAX_FDS {
        return Err(FrameError::Malformed("too many descriptors"));
    }
    let mut header = [0; HEADER];
    let len = u32::try_from(message.len()).map_err(|_long| FrameError::Malformed("the message is too long"))?;
    header[..4].copy_from_slice(&len.to_le_bytes());
    header[4] = u8::try_from(fds.len()).map_err(|_many| FrameError::Malformed("too many descriptors"))?;
    let mut sent = 0;
    while sent < HEADER + message.len() {
        let mut space = [MaybeUninit::uninit(); CONTROL];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(FrameError::Malformed("too many descriptors"));
        }
        let parts = [
            IoSlice::new(header.get(sent..).unwrap_or_default()),
            IoSlice::new(message.get(sent.saturating_sub(HEADER)..).unwrap_or_default()),
        ];
        match sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL) {
            Ok(bytes) => sent += bytes,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Receives a frame. Blocking.
pub(crate) fn receive(socket: impl AsFd) -> Result<Frame, FrameError> {
    let mut header = [0; HEADER];
    let mut fds = Vec::new();
    let mut have = 0;
    while let Some(rest) = header.get_mut(have..)
        && !rest.is_empty()
    {
        match receive_part(&socket, rest, &mut fds)? {
            0 if have == 0 => return Err(FrameError::Closed),
            0 => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            bytes => have += bytes,
        }
    }
    let [a, b, c, d, count, zeros @ ..] = header;
    if zeros != [0; 3] {
        return Err(FrameError::Malformed("its header is not known"));
    }
    if usize::from(count) != fds.len() {
        return Err(FrameError::Malformed("other descriptors came than it says"));
    }
    let len = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if len > MAX_MESSAGE {
        return Err(FrameError::Malformed("it is too long"));
    }
    let mut message = vec![0; len];
    let mut have = 0;
    let mut strays = Vec::new();
    while let Some(rest) = message.get_mut(have..)
        && !rest.is_empty()
    {
        match receive_part(&socket, rest, &mut strays)? {
            0 => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
            _ if !strays.is_empty() => return Err(FrameError::Malformed("descriptors came in the middle of it")),
            bytes => have += bytes,
        }
    }
    Ok(Frame { message, fds })
}

/// Reads some bytes, and the descriptors that came with them. Those are closed on an exec from the beginning.
fn receive_part(socket: impl AsFd, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, FrameError> {
    loop {
        let mut space = [MaybeUninit::uninit(); CONTROL];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let received = match received {
            Err(Errno::INTR) => continue,
            // A peer that died with bytes unread.
            Err(Errno::CONNRESET) => return Ok(0),
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
            return Err(FrameError::Malformed("too many descriptors"));
        }
        return Ok(received.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Seek as _, Write as _};
    use std::os::unix::net::UnixStream;

    use proptest::prelude::*;

    use super::*;

    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    fn text(fd: OwnedFd) -> String {
        let (mut file, mut text) = (File::from(fd), String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn descriptors_arrive_with_their_frame_however_many_frames_wait() {
        let (a, b) = UnixStream::pair().unwrap();
        let files: Vec<File> = (0..3).map(|n| file(&n.to_string())).collect();
        send(&a, b"none", &[]).unwrap();
        send(&a, b"two", &[files[0].as_fd(), files[1].as_fd()]).unwrap();
        send(&a, b"", &[files[2].as_fd()]).unwrap();
        send(&a, b"none", &[]).unwrap();
        drop((a, files));
        let mut frames = Vec::new();
        let end = loop {
            match receive(&b) {
                Ok(frame) => frames.push(frame),
                Err(error) => break error,
            }
        };
        assert!(matches!(end, FrameError::Closed), "{end}");
        let found: Vec<(Vec<u8>, Vec<String>)> =
            frames.into_iter().map(|frame| (frame.message, frame.fds.into_iter().map(text).collect())).collect();
        let expected = [
            (b"none".to_vec(), vec![]),
            (b"two".to_vec(), vec!["0".to_owned(), "1".to_owned()]),
            (vec![], vec!["2".to_owned()]),
            (b"none".to_vec(), vec![]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_message_of_the_greatest_length_arrives_and_a_longer_one_is_not_sent() {
        let (a, b) = UnixStream::pair().unwrap();
        let message: Vec<u8> = (0..MAX_MESSAGE).map(|n| u8::try_from(n % 251).unwrap()).collect();
        let passed = file("x");
        let received = std::thread::scope(|scope| {
            scope.spawn(|| send(&a, &message, &[passed.as_fd(); MAX_FDS]).unwrap());
            receive(&b).unwrap()
        });
        assert!(received.message == message);
        assert_eq!(received.fds.len(), MAX_FDS);
        assert!(matches!(send(&a, &vec![0; MAX_MESSAGE + 1], &[]), Err(FrameError::Malformed(_))));
        assert!(matches!(send(&a, b"", &[passed.as_fd(); MAX_FDS + 1]), Err(FrameError::Malformed(_))));
    }

    /// Raw bytes with raw descriptors, as no honest peer sends them.
    fn send_raw(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        assert_eq!(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap(), bytes.len());
    }

    #[test]
    fn what_is_no_frame_is_an_error_and_leaks_no_descriptor() {
        // The reading end tells when the last copy of the other one is closed.
        let (mut pipe, passed) = std::io::pipe().unwrap();
        let header = |len: u32, count: u8, zeros: [u8; 3]| [&len.to_le_bytes()[..], &[count], &zeros].concat();
        let cases: [(Vec<u8>, usize, Vec<u8>, usize); 7] = [
            (header(u32::MAX, 0, [0; 3]), 0, vec![], 0),
            (header(u32::try_from(MAX_MESSAGE + 1).unwrap(), 0, [0; 3]), 0, vec![], 0),
            (header(0, 0, [0, 0, 1]), 0, vec![], 0),
            (header(0, 1, [0; 3]), 0, vec![], 0),
            (header(0, 0, [0; 3]), 1, vec![], 0),
            (header(0, 40, [0; 3]), 40, vec![], 0),
            (header(4, 0, [0; 3]), 0, vec![1, 2], 1),
        ];
        for (first, fds, second, more) in cases {
            let (a, b) = UnixStream::pair().unwrap();
            send_raw(&a, &first, &vec![passed.as_fd(); fds]);
            if !second.is_empty() {
                send_raw(&a, &second, &vec![passed.as_fd(); more]);
            }
            let error = receive(&b).unwrap_err();
            assert!(matches!(error, FrameError::Malformed(_)), "{first:?} {error:?}");
        }
        drop(passed);
        assert_eq!(pipe.read(&mut [0]).unwrap(), 0);
        // A peer that ends in the middle.
        for bytes in [&[1u8, 0][..], &[5, 0, 0, 0, 0, 0, 0, 0, 1]] {
            let (mut a, b) = UnixStream::pair().unwrap();
            a.write_all(bytes).unwrap();
            drop(a);
            assert!(matches!(receive(&b).unwrap_err(), FrameError::Io(_)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Any message and number of descriptors comes out as it went in.
        #[test]
        fn frames_survive_the_trip(message in proptest::collection::vec(any::<u8>(), 0..5000), fds in 0usize..=MAX_FDS) {
            let (a, b) = UnixStream::pair().unwrap();
            send(&a, &message, &vec![a.as_fd(); fds]).unwrap();
            let frame = receive(&b).unwrap();
            prop_assert_eq!(frame.message, message);
            prop_assert_eq!(frame.fds.len(), fds);
        }

        /// Bytes of a stranger, in pieces, some with descriptors: frames or an error, never a panic, and always an end.
        #[test]
        fn any_bytes_end_in_frames_or_an_error(
            pieces in proptest::collection::vec((proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 1..40), 0usize..20), 0..8),
        ) {
            let (a, b) = UnixStream::pair().unwrap();
            for (bytes, fds) in &pieces {
                send_raw(&a, bytes, &vec![a.as_fd(); *fds]);
            }
            rustix::net::shutdown(&a, rustix::net::Shutdown::Write).unwrap();
            let sent: usize = pieces.iter().map(|(bytes, _)| bytes.len()).sum();
            let mut frames = 0;
            while receive(&b).is_ok() {
                frames += 1;
                prop_assert!(frames <= sent / HEADER);
            }
        }
    }
}
