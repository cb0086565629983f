//! The unprivileged half as a process: started by the other one as a user of its own, without a way back.
//!
//! It is the same program, executed anew. Its standard input is its end of the socket: a descriptor that needs no
//! agreement on a number. Nothing else that root opened goes over with it; what it may have comes with the greeting.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, clear_ambient_capability_set, remove_capability_from_bounding_set, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// Whom the unprivileged half runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User id; not root's.
    pub uid: u32,
    /// Group id; not root's.
    pub gid: u32,
}

impl Identity {
    /// Of a user of this machine.
    ///
    /// # Errors
    /// When `/etc/passwd` can't be read, or the user is root.
    pub fn of_user(name: &str) -> io::Result<Option<Self>> {
        let identity = parse(&std::fs::read_to_string("/etc/passwd")?, name);
        if identity.is_some_and(|identity| identity.uid == 0 || identity.gid == 0) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("user {name} is root")));
        }
        Ok(identity)
    }
}

fn parse(passwd: &str, name: &str) -> Option<Identity> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next() == Some(name);
        let mut number = |skip| fields.nth(skip)?.parse().ok();
        found.then(|| Some(Identity { uid: number(1)?, gid: number(0)? })).flatten()
    })
}

/// Starts this program again as `identity`, with these arguments (the first is its name) and one more variable in its
/// environment. It has no capabilities and can't gain any, no descriptors but `socket` as its standard input and the
/// outputs of this process, and is a process group of its own: what a terminal sends reaches the caller only.
///
/// # Errors
/// What the system says.
pub fn start(
    identity: Identity,
    arguments: impl IntoIterator<Item = OsString>,
    variable: (&str, &str),
    socket: UnixStream,
) -> io::Result<Child> {
    let mut arguments = arguments.into_iter();
    // Not by a path: it may have been replaced, or be where that user can't look.
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    command.args(arguments).env(variable.0, variable.1).stdin(Stdio::from(OwnedFd::from(socket))).process_group(0);
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    // SAFETY: between fork and exec only system calls are made, on plain data that was made before; nothing allocates or
    // takes a lock.
    unsafe { command.pre_exec(move || give_up(uid, gid)) };
    command.spawn()
}

/// Everything that root has, in the order in which it can be given up.
fn give_up(uid: Uid, gid: Gid) -> io::Result<()> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    close_on_exec_from(3)?;
    // What an exec could bring back at most. Without the right to (a container may lack it), the next but one line holds.
    for bit in 0..64 {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
            Ok(()) => {}
            // Numbers that the kernel does not know begin here.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::PERM) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    clear_ambient_capability_set()?;
    set_no_new_privs(true)?;
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    // The last: it takes the capabilities along.
    set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}

fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: marks descriptors; it closes none and touches no memory.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// In the unprivileged half: takes the socket from standard input, which is `/dev/null` afterwards.
///
/// # Errors
/// When standard input is no socket.
pub fn take_socket() -> io::Result<UnixStream> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    crate::check::stream_socket(&socket)
        .map_err(|_refused| io::Error::new(io::ErrorKind::InvalidInput, "standard input is no socket"))?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(UnixStream::from(socket))
}

/// In the unprivileged half: makes sure that it is one.
///
/// # Errors
/// Says what it still could do.
pub fn check_unprivileged() -> io::Result<()> {
    match privileges(&std::fs::read_to_string("/proc/self/status")?) {
        None => Ok(()),
        Some(what) => Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("this process still has {what}"))),
    }
}

/// The first line of a process' status that says more than it should.
fn privileges(status: &str) -> Option<String> {
    let line = |name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        found.map_or_else(Vec::new, |rest| rest.split_ascii_whitespace().collect::<Vec<_>>())
    };
    let ids = |name: &str| {
        let ids = line(name);
        ids.len() != 4 || ids.iter().any(|id| *id == "0" || Some(id) != ids.first())
    };
    let none = |name: &str| line(name).first().is_none_or(|set| set.bytes().any(|digit| digit != b'0'));
    let checks = [
        ("the user id of root", ids("Uid")),
        ("the group id of root", ids("Gid")),
        ("other groups", !line("Groups").is_empty()),
        ("permitted capabilities", none("CapPrm")),
        ("effective capabilities", none("CapEff")),
        ("inheritable capabilities", none("CapInh")),
        ("ambient capabilities", none("CapAmb")),
        ("a way to new privileges", line("NoNewPrivs") != ["1"]),
    ];
    checks.into_iter().find(|(_, has)| *has).map(|(what, _)| what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_their_whole_name() {
        let passwd =
            "root:x:0:0:root:/root:/bin/sh\ncoppice-vmm:x:999:995::/:/x\ncoppice:x:998:994::/:/x\nbad:x:q:1:::\n";
        assert_eq!(parse(passwd, "coppice"), Some(Identity { uid: 998, gid: 994 }));
        assert_eq!(parse(passwd, "copp"), None);
        assert_eq!(parse(passwd, "bad"), None);
        assert!(Identity::of_user("root").is_err());
        assert_eq!(Identity::of_user("there is no such user").unwrap(), None);
    }

    #[test]
    fn every_privilege_that_is_left_is_named() {
        let good = "Name:\tcoppice\nUid:\t998\t998\t998\t998\nGid:\t994\t994\t994\t994\nGroups:\t \nNoNewPrivs:\t1\n\
                    CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
                    CapBnd:\t000001ffffffffff\nCapAmb:\t0000000000000000\n";
        assert_eq!(privileges(good), None);
        for (from, to, named) in [
            ("Uid:\t998\t998", "Uid:\t998\t0", "user"),
            ("994\t994\nGroups", "994\t993\nGroups", "group"),
            ("Groups:\t ", "Groups:\t27 ", "groups"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "new"),
            ("CapEff:\t0000000000000000", "CapEff:\t0000000000000001", "effective"),
            ("CapPrm:\t0000000000000000\n", "", "permitted"),
        ] {
            assert!(good.contains(from));
            let found = privileges(&good.replace(from, to)).unwrap();
            assert!(found.contains(named), "{found}");
        }
    }
}
