//! Rooms (namespaces), a guest without a machine, and servers that remember what reached them.
//!
//! A [`Lab`] is a host with an outside, both in throw-away namespaces: the network under test is opened from inside the host,
//! so that tests run side by side, and nothing of them touches the machine's own addresses, routes and rules. When the test's
//! process ends, however it ends, the namespaces go with it.

#![expect(dead_code, reason = "each test binary uses a part of it")]
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod guest;

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coppice_net::{NetConfig, Network, SlotRecord, Slots, instance_id};

/// The host's own address, and the server outside.
pub const HOST: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
pub const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// Another server outside.
pub const OTHER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
/// Addresses that the host can reach and no guest may.
pub const PRIVATE: [Ipv4Addr; 5] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(10, 1, 2, 3),
    Ipv4Addr::new(172, 20, 0, 9),
    Ipv4Addr::new(192, 168, 7, 7),
    Ipv4Addr::new(100, 64, 0, 1),
];
/// Where servers listen.
pub const PORT: u16 = 7000;
pub const OTHER_PORT: u16 = 7001;

/// How long something may take that must happen.
pub const SOON: Duration = Duration::from_secs(5);
/// How long to wait for what must not happen.
pub const NEVER: Duration = Duration::from_millis(150);

/// Whether the tests can run; says so if not.
pub fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root, to make network namespaces, TAPs and rules");
    }
    root
}

/// An id that no other test uses at the same time.
pub fn fresh_id() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    instance_id(Path::new(&format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))))
}

/// Runs `ip` in the calling thread's namespace.
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread in a namespace of its own.
pub struct Room {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    pub tid: u32,
}

impl Room {
    pub fn new() -> Self {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, tid) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: only the network namespace of this thread changes, which nothing else relies on.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
            ready.send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()).unwrap();
            queue.into_iter().for_each(|job| job());
        });
        Self { jobs: Some(jobs), thread: Some(thread), tid: tid.recv().unwrap() }
    }

    pub fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (answer, answered) = mpsc::channel();
        self.jobs.as_ref().unwrap().send(Box::new(move || drop(answer.send(job())))).unwrap();
        answered.recv().expect("the job panicked in its room")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.jobs.take();
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// A datagram that reached a server.
#[derive(Debug, Clone, PartialEq)]
pub struct Heard {
    pub at: SocketAddrV4,
    pub from: SocketAddrV4,
    pub text: String,
}

/// Servers that remember what reached them, and send it back.
pub struct Servers {
    heard: Arc<Mutex<Vec<Heard>>>,
    sockets: Vec<(SocketAddrV4, UdpSocket)>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

fn v4(address: SocketAddr) -> SocketAddrV4 {
    match address {
        SocketAddr::V4(address) => address,
        SocketAddr::V6(_) => panic!("IPv6"),
    }
}

impl Servers {
    /// In a room, at these addresses.
    pub fn start(room: &Room, addresses: &[SocketAddrV4]) -> Self {
        let (heard, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let mut servers = Self { heard, sockets: Vec::new(), stop, threads: Vec::new() };
        for address in addresses {
            let at = *address;
            let socket = room.run(move || UdpSocket::bind(at)).unwrap();
            // A server that is slow must not look like a rule that drops.
            rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 64 << 20).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            servers.sockets.push((at, socket.try_clone().unwrap()));
            let (heard, stop) = (Arc::clone(&servers.heard), Arc::clone(&servers.stop));
            servers.threads.push(std::thread::spawn(move || {
                let mut buffer = [0; 2048];
                while !stop.load(Ordering::Relaxed) {
                    let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
                    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    heard.lock().unwrap().push(Heard { at, from: v4(from), text });
                    drop(socket.send_to(&buffer[..length], from));
                }
            }));
        }
        servers
    }

    /// What a server heard of a text, waiting for it.
    pub fn wait_for(&self, text: &str) -> Option<Heard> {
        let until = Instant::now() + SOON;
        loop {
            let found = self.heard.lock().unwrap().iter().find(|heard| heard.text == text).cloned();
            if found.is_some() || Instant::now() > until {
                return found;
            }
            std::thread::yield_now();
        }
    }

    /// Everything that was heard so far.
    pub fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }

    /// Sends from a server, without having been asked.
    pub fn push(&self, at: SocketAddrV4, to: SocketAddrV4, text: &str) {
        let socket = &self.sockets.iter().find(|(address, _)| *address == at).unwrap().1;
        socket.send_to(text.as_bytes(), to).unwrap();
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// A network under test, which is gone when this is.
pub struct Instance {
    pub config: NetConfig,
    network: Option<Arc<Network>>,
    /// Where it is opened from; `None` is the machine itself.
    host: Option<Arc<Room>>,
}

impl Instance {
    pub fn open(host: Option<Arc<Room>>, limit: u32, ready: u32, bandwidth: Option<u64>) -> Self {
        let config = NetConfig { id: fresh_id(), limit, ready, bandwidth };
        let mut instance = Self { config, network: None, host };
        instance.restart(&[]);
        instance
    }

    pub fn network(&self) -> &Network {
        self.network.as_ref().unwrap()
    }

    /// For what needs a share of it; must be gone before this is.
    pub fn shared(&self) -> Arc<Network> {
        Arc::clone(self.network.as_ref().unwrap())
    }

    fn opened(&self) -> Network {
        let config = self.config.clone();
        match &self.host {
            Some(host) => host.run(move || Network::open(config)),
            None => Network::open(config),
        }
        .unwrap()
    }

    /// The daemon ends without a word.
    pub fn crash(&mut self) {
        self.network = None;
    }

    pub fn restart(&mut self, keep: &[SlotRecord]) {
        self.network = None;
        let network = self.opened();
        network.reclaim(keep).unwrap();
        self.network = Some(Arc::new(network));
    }

    pub fn netns(&self) -> String {
        format!("/run/netns/coppice-{}", self.config.id)
    }

    /// The output of a command inside the router namespace.
    pub fn inside(&self, command: &str) -> String {
        let output = Command::new("nsenter")
            .arg(format!("--net={}", self.netns()))
            .args(command.split_whitespace())
            .output()
            .unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The TAPs in the router namespace.
    pub fn links(&self) -> HashSet<String> {
        let list = self.inside("ip -o link");
        let names = list.lines().filter_map(|line| line.split(": ").nth(1)).map(|name| name.split('@').next().unwrap());
        names.filter(|name| name.starts_with('t')).map(str::to_owned).collect()
    }

    /// Every element of a set or a map that mentions an address of the pool.
    pub fn elements(&self, set: &str) -> usize {
        self.inside(&format!("nft list {set}")).matches("10.203.").count()
    }

    /// What the machine has of this instance.
    pub fn traces(&self) -> Vec<String> {
        let id = self.config.id.clone();
        let look = move || {
            let links = Command::new("ip").args(["-o", "link"]).output().unwrap();
            let tables = Command::new("nft").args(["list", "tables"]).output().unwrap();
            let text = [links.stdout, tables.stdout].concat();
            String::from_utf8(text).unwrap().lines().filter(|line| line.contains(&id)).map(str::to_owned).collect()
        };
        let mut traces: Vec<String> = match &self.host {
            Some(host) => host.run(look),
            None => look(),
        };
        traces.extend(Path::new(&self.netns()).exists().then(|| self.netns()));
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        traces.extend(mounts.lines().filter(|line| line.contains(&self.config.id)).map(str::to_owned));
        traces
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Also of a test that failed: nothing may be left of it.
        self.network = None;
        let network = self.opened();
        network.reclaim(&[]).and_then(|()| network.close()).unwrap();
        let traces = self.traces();
        if !std::thread::panicking() {
            assert_eq!(traces, Vec::<String>::new());
        }
    }
}

/// A host and its outside.
pub struct Lab {
    pub servers: Servers,
    /// Services of the host itself.
    pub services: Servers,
    pub instance: Instance,
    pub host: Arc<Room>,
    pub outside: Room,
}

impl Lab {
    pub fn new(limit: u32, ready: u32, bandwidth: Option<u64>) -> Self {
        let (host, outside) = (Arc::new(Room::new()), Room::new());
        let peer = outside.tid;
        host.run(move || {
            ip("link set lo up");
            ip(&format!("link add out0 type veth peer name eth0 netns {peer}"));
            ip(&format!("address add {HOST}/24 dev out0"));
            ip("link set out0 up");
        });
        outside.run(|| {
            ip("link set lo up");
            ip(&format!("address add {SERVER}/24 dev eth0"));
            ip("link set eth0 up");
            for address in PRIVATE.iter().chain([&OTHER]) {
                ip(&format!("address add {address}/32 dev lo"));
            }
            ip(&format!("route add 169.254.64.0/18 via {HOST}"));
        });
        host.run(|| ip(&format!("route add default via {SERVER}")));
        let at = |address: &Ipv4Addr| [SocketAddrV4::new(*address, PORT), SocketAddrV4::new(*address, OTHER_PORT)];
        let addresses: Vec<_> = PRIVATE.iter().chain([&SERVER, &OTHER]).flat_map(at).collect();
        let servers = Servers::start(&outside, &addresses);
        let services = Servers::start(&host, &[SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, PORT)]);
        let instance = Instance::open(Some(Arc::clone(&host)), limit, ready, bandwidth);
        Self { servers, services, instance, host, outside }
    }

    pub fn network(&self) -> &Network {
        self.instance.network()
    }
}

/// The address of the host's end of the link, as a guest that guesses well would know it.
pub fn link_address(host: &Room, id: &str) -> Ipv4Addr {
    let link = format!("cpc{id}");
    let output =
        host.run(move || Command::new("ip").args(["-o", "-4", "address", "show", "dev", &link]).output().unwrap());
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().find_map(|word| word.strip_suffix("/30")).unwrap().parse().unwrap()
}

pub fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBADFD | libc::EIO | libc::ENODEV))
}
