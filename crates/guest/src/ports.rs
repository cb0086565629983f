//! What listens in the machine, from `/proc/net`.
//!
//! Only TCP. It connects nowhere: that something listens does not say that it answers.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{self, BufRead, BufReader},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    ops::ControlFlow,
    path::Path,
};

use coppice_guest_proto::{limits::MAX_PORTS, v1};

/// Most open files that are looked at for the names of listening processes.
const MAX_FILES: usize = 65_536;
/// States (include/net/tcp_states.h). Also UDP sockets have them: connected ones are in that of an established connection, others
/// in CLOSE.
pub(crate) const FIN_WAIT2: u8 = 5;
const LISTEN: u8 = 10;
const TIME_WAIT: u8 = 6;
const CLOSE: u8 = 7;

/// One line of a table.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    address: IpAddr,
    port: u16,
    state: u8,
    inode: u64,
}

/// The listening ports, in order.
pub(crate) fn list(proc: &Path) -> io::Result<v1::ListPortsReply> {
    // By port: one that is bound to several addresses is reached by what the widest allows.
    let mut ports: BTreeMap<u16, (bool, Vec<u64>)> = BTreeMap::new();
    for name in ["tcp", "tcp6"] {
        table(&proc.join("thread-self/net").join(name), |entry| {
            // The kernel lists them before all connections, of which there may be very many.
            if entry.state != LISTEN {
                return ControlFlow::Break(());
            }
            let (loopback, inodes) = ports.entry(entry.port).or_insert((true, Vec::new()));
            *loopback &= entry.address.to_canonical().is_loopback();
            inodes.push(entry.inode);
            ControlFlow::Continue(())
        })?;
    }
    let truncated = ports.len() > MAX_PORTS;
    let inodes = ports.values().flat_map(|(_, inodes)| inodes.iter().copied());
    let names = if ports.is_empty() { HashMap::new() } else { processes(proc, inodes.collect()) };
    let ports = ports.into_iter().take(MAX_PORTS).map(|(port, (loopback_only, inodes))| v1::ListeningPort {
        port: port.into(),
        loopback_only,
        process: inodes.iter().find_map(|inode| names.get(inode).cloned()).unwrap_or_default(),
    });
    Ok(v1::ListPortsReply { ports: ports.collect(), truncated })
}

/// TCP connections and connected UDP sockets from `address`. `tables` is a directory like `/proc/net`.
pub(crate) fn connections_from(tables: &Path, address: Ipv4Addr) -> io::Result<usize> {
    let mut open = 0;
    for name in ["tcp", "tcp6", "udp", "udp6"] {
        table(&tables.join(name), |entry| {
            let here = entry.address.to_canonical() == IpAddr::V4(address);
            // The last: closed here, and waiting for the peer.
            let over =
                [LISTEN, TIME_WAIT, CLOSE].contains(&entry.state) || (entry.state, entry.inode) == (FIN_WAIT2, 0);
            open += usize::from(here && !over);
            ControlFlow::Continue(())
        })?;
    }
    Ok(open)
}

/// Reads a table. A kernel without IPv6 has none for it.
fn table(path: &Path, mut each: impl FnMut(Entry) -> ControlFlow<()>) -> io::Result<()> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    for line in BufReader::new(file).lines() {
        if parse(&line?).is_some_and(|entry| each(entry).is_break()) {
            break;
        }
    }
    Ok(())
}

/// `sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …`; addresses are words of the machine's byte
/// order in hex.
fn parse(line: &str) -> Option<Entry> {
    let mut fields = line.split_ascii_whitespace();
    let (address, port) = fields.nth(1)?.split_once(':')?;
    let state = u8::from_str_radix(fields.nth(1)?, 16).ok()?;
    let inode = fields.nth(5)?.parse().ok()?;
    let word = |at: usize| Some(u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let address = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (to, at) in bytes.chunks_mut(4).zip([0, 8, 16, 24]) {
                to.copy_from_slice(&word(at)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(Entry { address, port: u16::from_str_radix(port, 16).ok()?, state, inode })
}

/// Names of the processes that hold these sockets, as far as the bound lets it look.
fn processes(proc: &Path, mut wanted: Vec<u64>) -> HashMap<u64, String> {
    let mut names = HashMap::new();
    let mut looked_at = 0;
    let Ok(processes) = fs::read_dir(proc) else { return names };
    for process in processes.filter_map(Result::ok) {
        if !process.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // It may have ended meanwhile.
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        for file in files.filter_map(Result::ok) {
            looked_at += 1;
            if wanted.is_empty() || looked_at > MAX_FILES {
                return names;
            }
            let Some(inode) = fs::read_link(file.path()).ok().as_deref().and_then(socket_inode) else { continue };
            if let Some(at) = wanted.iter().position(|wanted| *wanted == inode) {
                wanted.swap_remove(at);
                names.insert(inode, name_of(&process.path()));
            }
        }
    }
    names
}

/// `socket:[123]`.
fn socket_inode(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// A process says itself what it is called: what is no text is left out.
fn name_of(process: &Path) -> String {
    let name = fs::read(process.join("comm")).unwrap_or_default();
    String::from_utf8_lossy(&name).chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_of_the_tables() {
        let line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 100 0 0 10 0";
        let listening = Entry { address: Ipv4Addr::LOCALHOST.into(), port: 8080, state: LISTEN, inode: 4242 };
        assert_eq!(parse(line), Some(listening));
        let line = "  11: 0000000000000000FFFF0000050ACB0A:0050 0000000000000000FFFF00000100CB0A:A3F2 01 00000000:00000000 02:00 00000000 0 0 7 2 0";
        let mapped = Ipv4Addr::new(10, 203, 10, 5).to_ipv6_mapped();
        assert_eq!(parse(line), Some(Entry { address: mapped.into(), port: 80, state: 1, inode: 7 }));
        assert_eq!(
            parse("  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"),
            None
        );
    }

    #[test]
    fn connections_are_counted_in_all_tables() {
        let dir = tempfile::tempdir().unwrap();
        let line = |address: &str, state: &str| format!("0: {address}:0050 00000000:0000 {state} 0:0 0:0 0 0 0 7 1\n");
        let ours = line("0501CB0A", "01")
            + &line("0501CB0A", "0A")
            + &line("0501CB0A", "06")
            + &line("0501CB0A", "05").replace(" 7 1", " 0 1")
            + &line("0100007F", "01");
        fs::write(dir.path().join("tcp"), ours).unwrap();
        fs::write(dir.path().join("tcp6"), line("0000000000000000FFFF00000501CB0A", "02")).unwrap();
        fs::write(dir.path().join("udp"), line("0501CB0A", "07") + &line("0501CB0A", "01")).unwrap();
        assert_eq!(connections_from(dir.path(), Ipv4Addr::new(10, 203, 1, 5)).unwrap(), 3);
        assert_eq!(connections_from(dir.path(), Ipv4Addr::new(10, 203, 1, 6)).unwrap(), 0);
    }

    #[test]
    fn what_listens_here_is_found_with_the_name_of_its_process() {
        let loopback = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let all = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let six = std::net::TcpListener::bind("[::]:0");
        let reply = list(Path::new("/proc")).unwrap();
        let name = name_of(Path::new("/proc/self"));
        let find = |listener: &std::net::TcpListener| {
            let port = u32::from(listener.local_addr().unwrap().port());
            reply.ports.iter().find(|found| found.port == port).unwrap()
        };
        assert!(find(&loopback).loopback_only && find(&loopback).process == name, "{reply:?}");
        assert!(!find(&all).loopback_only && find(&all).process == name, "{reply:?}");
        if let Ok(six) = six {
            assert!(!find(&six).loopback_only);
        }
        assert!(reply.ports.is_sorted_by_key(|port| port.port));
    }

    proptest! {
        #[test]
        fn no_line_panics(line in "[ 0-9A-F:äx]{0,120}") {
            // What is understood has at least the fields up to the inode.
            prop_assert!(parse(&line).is_none() || line.split_ascii_whitespace().count() >= 10);
        }
    }
}
