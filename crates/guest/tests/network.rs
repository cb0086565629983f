//! The network of a machine with the kernel's real netlink, in two network namespaces of the test: one is the sandbox, the
//! other one what is outside. Needs root.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, OwnedFd},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use coppice_guest::{LinuxSystem, NetworkConfig, System};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 203, 0, 1);
const OLD: Ipv4Addr = Ipv4Addr::new(10, 203, 1, 5);
const NEW: Ipv4Addr = Ipv4Addr::new(10, 203, 1, 6);

fn config(address: Ipv4Addr) -> NetworkConfig {
    let [.., last] = address.octets();
    NetworkConfig { mac: [2, 0x63, 0, 0, 0, last], address, prefix: 32, gateway: GATEWAY, dns: vec![GATEWAY] }
}

/// The test in a thread that is in a namespace of its own; nothing of it is left when the thread ends.
fn in_namespace(test: impl FnOnce() + Send + 'static) {
    let outcome = thread::spawn(|| {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: network namespaces need root");
            return;
        }
        // SAFETY: only the network namespace of this thread changes, and the test's sockets are opened in it.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        ip("link set lo up");
        test();
    });
    if let Err(panic) = outcome.join() {
        std::panic::resume_unwind(panic);
    }
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// What the thread's namespace is connected to by `eth0`.
struct Outside {
    inside: OwnedFd,
    outside: OwnedFd,
}

fn namespace() -> OwnedFd {
    std::fs::File::open("/proc/thread-self/ns/net").unwrap().into()
}

impl Outside {
    /// A pair of interfaces, with the gateway's address and routes to both addresses on the other side.
    fn new() -> Self {
        let inside = namespace();
        // SAFETY: as above.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
        let this = Self { inside, outside: namespace() };
        ip("link set lo up");
        ip("link add gw type veth peer name eth0");
        ip(&format!("addr add {GATEWAY}/32 dev gw"));
        ip("link set gw up");
        for address in [OLD, NEW] {
            ip(&format!("route add {address} dev gw"));
        }
        // The child's own process is in the other namespace.
        let target = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&this.inside));
        ip(&format!("link set eth0 netns {target}"));
        this.enter(&this.inside);
        this
    }

    fn enter(&self, namespace: &OwnedFd) {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }

    fn run<T>(&self, what: impl FnOnce() -> T) -> T {
        self.enter(&self.outside);
        let result = what();
        self.enter(&self.inside);
        result
    }
}

fn up(system: &LinuxSystem) {
    assert!(system.bring_network_up().unwrap());
}

#[test]
fn without_an_interface_there_is_no_network() {
    in_namespace(|| {
        let system = LinuxSystem::new();
        assert!(!system.bring_network_up().unwrap());
        let error = system.set_network(None, &config(OLD)).unwrap_err();
        assert!(error.to_string().contains("eth0"), "{error}");
    });
}

#[test]
fn an_interface_is_brought_up_and_set_and_changed() {
    in_namespace(|| {
        let outside = Outside::new();
        let system = LinuxSystem::new();
        up(&system);
        let link = ip("-o link show eth0");
        assert!(link.contains("UP"), "{link}");
        assert_eq!(ip("-6 -o addr show dev eth0"), "", "no IPv6, not even link-local");
        assert!(ip("-6 -o addr show dev lo").contains("::1/128"), "but on loopback");

        // A handshake may be repeated.
        for _ in 0..2 {
            system.set_network(None, &config(OLD)).unwrap();
        }
        assert!(ip("-o link show eth0").contains("02:63:00:00:00:05"));
        assert!(ip("-4 -o addr show dev eth0").contains("10.203.1.5/32"));
        let route = ip("route show default");
        assert!(route.contains("default via 10.203.0.1 dev eth0") && route.contains("onlink"), "{route}");
        let talk = |from: Ipv4Addr| {
            let listener = outside.run(|| TcpListener::bind((GATEWAY, 0)).unwrap());
            drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            assert_eq!(listener.accept().unwrap().1.ip(), from);
        };
        talk(OLD);

        for _ in 0..2 {
            system.set_network(Some(&config(OLD)), &config(NEW)).unwrap();
        }
        assert!(ip("-o link show eth0").contains("02:63:00:00:00:06"));
        let addresses = ip("-4 -o addr show dev eth0");
        assert!(addresses.contains("10.203.1.6/32") && !addresses.contains("10.203.1.5"), "{addresses}");
        assert_eq!(ip("route show default"), route, "the route has stayed");
        // The old neighbour entry went with the MAC; outside asks again.
        outside.run(|| ip("neigh flush dev gw"));
        talk(NEW);

        let error = system.set_network(None, &NetworkConfig { mac: [1; 6], ..config(NEW) }).unwrap_err();
        assert!(error.to_string().contains("setting the MAC address"), "{error}");
    });
}

/// Reads until something happens, in a thread, which is in the namespace of its parent.
fn blocked_read(mut stream: TcpStream) -> thread::JoinHandle<(std::io::Result<usize>, Instant)> {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    thread::spawn(move || (stream.read(&mut [0; 8]), Instant::now()))
}

#[test]
fn connections_from_the_old_address_end_and_all_others_live() {
    in_namespace(|| {
        let outside = Outside::new();
        let system = LinuxSystem::new();
        up(&system);
        system.set_network(None, &config(OLD)).unwrap();

        let peer = outside.run(|| TcpListener::bind((GATEWAY, 0)).unwrap());
        let echo = outside.run(|| UdpSocket::bind((GATEWAY, 0)).unwrap());
        let all_v4 = TcpListener::bind("0.0.0.0:0").unwrap();
        let all_v6 = TcpListener::bind("[::]:0").unwrap();
        let udp_server = UdpSocket::bind("0.0.0.0:0").unwrap();

        // Connected from inside; accepted inside, by IPv4 and as IPv4 in IPv6; and more than one batch of them.
        let client = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
        let mut parent_side = peer.accept().unwrap().0;
        let connect = |listener: &TcpListener| {
            let port = listener.local_addr().unwrap().port();
            let outer = outside.run(|| TcpStream::connect((OLD, port)).unwrap());
            (outer, listener.accept().unwrap().0)
        };
        let (_outer4, served4) = connect(&all_v4);
        let (_outer6, served6) = connect(&all_v6);
        let many: Vec<_> = (0..150)
            .map(|_| (TcpStream::connect(peer.local_addr().unwrap()).unwrap(), peer.accept().unwrap().0))
            .collect();
        let udp = UdpSocket::bind("0.0.0.0:0").unwrap();
        udp.connect(echo.local_addr().unwrap()).unwrap();
        let mut inner = TcpStream::connect(("127.0.0.1", all_v4.local_addr().unwrap().port())).unwrap();
        let mut inner_served = all_v4.accept().unwrap().0;

        // Closed on this side, and not on the other one.
        let closed = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
        let _half_open = peer.accept().unwrap();
        drop(closed);

        let reads: Vec<_> = [client, served4, served6].into_iter().map(blocked_read).collect();
        udp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let udp_read = thread::spawn(move || (udp.recv(&mut [0; 8]), Instant::now()));
        #[expect(clippy::disallowed_methods, reason = "lets the readers block; it is right as well if one does not")]
        thread::sleep(Duration::from_millis(50));

        let begun = Instant::now();
        system.set_network(Some(&config(OLD)), &config(NEW)).unwrap();
        let set = begun.elapsed();
        system.end_connections(OLD).unwrap();
        eprintln!("set_network {set:?}, end_connections {:?}", begun.elapsed() - set);
        for read in reads.into_iter().chain([udp_read]) {
            let (result, at) = read.join().unwrap();
            assert_eq!(result.unwrap_err().kind(), ErrorKind::ConnectionAborted);
            assert!(at - begun < Duration::from_secs(1), "{:?}", at - begun);
        }
        for (stream, _) in &many {
            let error = (&*stream).write(b"x").unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe), "{error}");
        }
        // Nothing was sent to the peer, whose connection is the original's.
        parent_side.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        assert_eq!(parent_side.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);

        // Loopback goes on, and who listens is there on the new address.
        inner.write_all(b"hello").unwrap();
        inner_served.read_exact(&mut [0; 5]).unwrap();
        outside.run(|| ip("neigh flush dev gw"));
        for listener in [&all_v4, &all_v6] {
            let port = listener.local_addr().unwrap().port();
            let mut outer = outside.run(|| TcpStream::connect((NEW, port)).unwrap());
            outer.write_all(b"hello").unwrap();
            listener.accept().unwrap().0.read_exact(&mut [0; 5]).unwrap();
        }
        let port = udp_server.local_addr().unwrap().port();
        let outer = outside.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        outer.send_to(b"hello", (NEW, port)).unwrap();
        udp_server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert_eq!(udp_server.recv(&mut [0; 8]).unwrap(), 5);

        // Nothing to end any more.
        system.end_connections(OLD).unwrap();
    });
}
