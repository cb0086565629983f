//! Limits of what a VMM may use, in either layout of cgroups.
//!
//! Groups are `coppice-ID/vm-INDEX` (that of the jail's slot), below every controller's mount (v1) or the one of all (v2). One is made before the VMM
//! is started and removed when it has been reaped, and the parent with the last of them, so that nothing is there when no
//! VMM is; what an earlier run left is removed when this starts. Which controllers there are is found out once.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// What a VMM may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub memory_bytes: u64,
    /// Processors' worth of time.
    pub cpus: u64,
    pub processes: u64,
}

/// The controllers without which there are no limits worth the name; block I/O weights are set where they can be.
const NEEDED: [&str; 3] = ["memory", "cpu", "pids"];
/// Weights of all sandboxes together: as many as a busy host's other groups, so that creating one does not wait for them.
const PARENT_SHARES: u64 = 10_240;
const PARENT_WEIGHT: u64 = 1000;
/// How often a group is tried again whose parent vanishes.
const ATTEMPTS: u32 = 5;
/// How often the removal of a group is tried that no process is in any more, and the time between.
const REMOVALS: u32 = 100;
const REMOVAL_PAUSE: std::time::Duration = std::time::Duration::from_millis(2);
/// Of `cpu.cfs_period_us` and `cpu.max`, microseconds.
const PERIOD: u64 = 100_000;

/// How this host lays out its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Layout {
    /// One hierarchy for each controller: its name and where it is mounted.
    V1(Vec<(String, PathBuf)>),
    /// One for all.
    V2(PathBuf),
}

/// The groups of one instance.
#[derive(Debug)]
pub(crate) struct Cgroups {
    layout: Layout,
    /// `coppice-ID`.
    parent: String,
}

impl Drop for Cgroups {
    /// What could not be removed when its VMM ended goes now, unless a VMM lives on in it.
    fn drop(&mut self) {
        self.reclaim();
        self.remove_parents();
    }
}

/// The group of one VMM, in every hierarchy.
#[derive(Debug)]
pub(crate) struct Group {
    name: String,
    pub procs: Vec<File>,
}

impl Cgroups {
    /// Finds the layout, tries whether groups can be made, and removes groups of VMMs that are gone.
    pub fn new(id: &str) -> io::Result<Self> {
        let layout = detect(&std::fs::read_to_string("/proc/self/mountinfo")?)?;
        let this = Self { layout, parent: format!("coppice-{id}") };
        let made = this.make_parents();
        this.reclaim();
        this.remove_parents();
        made.map(|()| this)
    }

    fn hierarchies(&self) -> Vec<(&str, PathBuf)> {
        match &self.layout {
            Layout::V1(all) => all.iter().map(|(name, mount)| (name.as_str(), mount.join(&self.parent))).collect(),
            Layout::V2(mount) => vec![("", mount.join(&self.parent))],
        }
    }

    fn make_parents(&self) -> io::Result<()> {
        if let Layout::V2(mount) = &self.layout {
            enable(mount)?;
        }
        for (controller, dir) in self.hierarchies() {
            make_dir(&dir)?;
            match controller {
                "" => {
                    enable(&dir)?;
                    write(&dir, "cpu.weight", PARENT_WEIGHT)?;
                }
                "cpu" => write(&dir, "cpu.shares", PARENT_SHARES)?,
                // Without it a child's pages are not accounted to its parent, and the kernel warns.
                "memory" => write_if_there(&dir, "memory.use_hierarchy", 1),
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes the group with the name `name` and its limits. Whatever of it is there already is taken.
    pub fn make(&self, name: &str, limits: &Limits) -> io::Result<Group> {
        let mut group = Group { name: name.to_owned(), procs: Vec::new() };
        let mut made = self.fill(&mut group, limits);
        for _ in 0..ATTEMPTS {
            match &made {
                // There is no parent yet, or the last group besides this one was removed just now, and the parent with it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    group.procs.clear();
                    made = self.make_parents().and_then(|()| self.fill(&mut group, limits));
                }
                _ => break,
            }
        }
        if let Err(error) = made {
            self.remove(&group.name);
            return Err(error);
        }
        Ok(group)
    }

    fn fill(&self, group: &mut Group, limits: &Limits) -> io::Result<()> {
        for (controller, parent) in self.hierarchies() {
            let dir = parent.join(&group.name);
            make_dir(&dir)?;
            match controller {
                "" => {
                    write(&dir, "memory.max", limits.memory_bytes)?;
                    write(&dir, "cpu.max", format!("{} {PERIOD}", limits.cpus * PERIOD))?;
                    write(&dir, "pids.max", limits.processes)?;
                    write_if_there(&dir, "io.weight", 100);
                }
                "memory" => write(&dir, "memory.limit_in_bytes", limits.memory_bytes)?,
                "cpu" => {
                    write(&dir, "cpu.cfs_period_us", PERIOD)?;
                    write(&dir, "cpu.cfs_quota_us", limits.cpus * PERIOD)?;
                }
                "pids" => write(&dir, "pids.max", limits.processes)?,
                "blkio" => {
                    write_if_there(&dir, "blkio.weight", 500);
                    write_if_there(&dir, "blkio.bfq.weight", 100);
                }
                _ => {}
            }
            group.procs.push(OpenOptions::new().write(true).open(dir.join("cgroup.procs"))?);
        }
        Ok(())
    }

    /// Removes a group, and the parent when it was the last. One that is not there, or not empty, is left: [`Self::new`] of the next run tries again.
    pub fn remove(&self, name: &str) {
        for (_, parent) in self.hierarchies() {
            remove_dir(&parent.join(name));
        }
        self.remove_parents();
    }

    /// Processes in any of the instance's groups.
    pub fn members(&self) -> io::Result<Vec<i32>> {
        let mut found = Vec::new();
        for (_, parent) in self.hierarchies() {
            let groups = match std::fs::read_dir(&parent) {
                Ok(groups) => groups,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(named(&parent, error)),
            };
            for group in groups {
                // Removed meanwhile: nobody is in it.
                let procs = std::fs::read_to_string(group?.path().join("cgroup.procs")).unwrap_or_default();
                found.extend(procs.lines().filter_map(|pid| pid.parse::<i32>().ok()));
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    fn reclaim(&self) {
        for (_, parent) in self.hierarchies() {
            for entry in std::fs::read_dir(&parent).into_iter().flatten().flatten() {
                if entry.file_name().as_encoded_bytes().starts_with(b"vm-") {
                    remove_dir(&entry.path());
                }
            }
        }
    }

    fn remove_parents(&self) {
        for (_, parent) in self.hierarchies() {
            // Not empty: VMMs live on.
            std::fs::remove_dir(parent).ok();
        }
    }

    /// Whether `/proc/PID/cgroup` says that a process is in a group in every hierarchy; else which one it is not in.
    pub fn holds(&self, text: &str, name: &str) -> Result<(), String> {
        let path = format!("/{}/{name}", self.parent);
        for (controller, _) in self.hierarchies() {
            let inside = text.lines().any(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next().unwrap_or_default();
                let matches = if controller.is_empty() {
                    controllers.is_empty()
                } else {
                    controllers.split(',').any(|c| c == controller)
                };
                // A host that is a container itself sees a longer path.
                matches && fields.next().is_some_and(|found| found.ends_with(&path))
            });
            if !inside {
                return Err(format!("it is not in {path} of {controller:?}"));
            }
        }
        Ok(())
    }
}

/// From `/proc/self/mountinfo`: where the needed controllers are.
fn detect(mountinfo: &str) -> io::Result<Layout> {
    let mut v1: Vec<(String, PathBuf)> = Vec::new();
    let mut v2 = None;
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mount = left.split(' ').nth(4).map(PathBuf::from);
        let mut right = right.split(' ');
        let (kind, options) = (right.next(), right.nth(1).unwrap_or_default());
        match (kind, mount) {
            (Some("cgroup"), Some(mount)) => {
                let known = NEEDED.iter().chain(&["blkio"]);
                let here = known.filter(|known| options.split(',').any(|option| option == **known));
                v1.extend(here.map(|controller| ((*controller).to_owned(), mount.clone())));
            }
            (Some("cgroup2"), Some(mount)) => v2 = Some(mount),
            _ => {}
        }
    }
    let missing = |have: &dyn Fn(&str) -> bool| NEEDED.iter().find(|needed| !have(needed)).copied();
    if v1.iter().any(|(controller, _)| controller == "memory") {
        // The same mount may be listed twice; two controllers of one mount share their groups.
        v1.dedup();
        return match missing(&|needed| v1.iter().any(|(controller, _)| controller == needed)) {
            None => Ok(Layout::V1(v1)),
            Some(name) => Err(io::Error::new(io::ErrorKind::NotFound, format!("no cgroup v1 controller {name}"))),
        };
    }
    v2.map(Layout::V2).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no cgroups are mounted"))
}

/// Lets the children of a v2 group have the needed controllers.
fn enable(dir: &Path) -> io::Result<()> {
    let control = dir.join("cgroup.subtree_control");
    let have = std::fs::read_to_string(&control)?;
    let offered = std::fs::read_to_string(dir.join("cgroup.controllers"))?;
    for controller in NEEDED.iter().chain(&["io"]) {
        if have.split_whitespace().any(|name| name == *controller) {
            continue;
        }
        let is_offered = offered.split_whitespace().any(|name| name == *controller);
        match (is_offered, *controller) {
            (false, "io") => {}
            (false, name) => {
                let what = format!("no cgroup v2 controller {name} at {}", dir.display());
                return Err(io::Error::new(io::ErrorKind::NotFound, what));
            }
            (true, name) => write(dir, "cgroup.subtree_control", format!("+{name}"))?,
        }
    }
    Ok(())
}

fn make_dir(dir: &Path) -> io::Result<()> {
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(named(dir, error)),
        _ => Ok(()),
    }
}

/// A process leaves its group a moment after it counts as ended (its threads are let go one by one), and a group is only
/// removed when the last one has left.
#[expect(clippy::disallowed_methods, reason = "the privileged side has no async runtime")]
fn remove_dir(dir: &Path) {
    for attempt in 1..=REMOVALS {
        match std::fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempt < REMOVALS && is_empty(dir) => {
                std::thread::sleep(REMOVAL_PAUSE);
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return tracing::debug!(dir = %dir.display(), %error, "a cgroup is not removed");
            }
            _ => return,
        }
    }
}

/// Whether no process is in a group that waits for anything: one that has ended is not listed any more.
fn is_empty(dir: &Path) -> bool {
    std::fs::read_to_string(dir.join("cgroup.procs")).is_ok_and(|procs| procs.is_empty())
}

fn write(dir: &Path, file: &str, value: impl ToString) -> io::Result<()> {
    let path = dir.join(file);
    // Not `create`: a missing file is a missing controller, not one to be made.
    let written = OpenOptions::new().write(true).open(&path);
    written
        .and_then(|mut file| io::Write::write_all(&mut file, value.to_string().as_bytes()))
        .map_err(|e| named(&path, e))
}

fn write_if_there(dir: &Path, file: &str, value: u64) {
    if let Err(error) = write(dir, file, value) {
        tracing::trace!(%error, "an optional cgroup setting was not made");
    }
}

fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "30 20 0:1 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
        31 30 0:2 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
        32 30 0:3 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
        33 30 0:4 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n\
        34 30 0:5 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

    #[test]
    fn both_layouts_are_told_apart_and_a_missing_controller_is_named() {
        let Layout::V1(found) = detect(V1).unwrap() else { panic!("v1") };
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["cpu", "memory", "pids"]);
        let v2 = "31 30 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(detect(v2).unwrap(), Layout::V2("/sys/fs/cgroup".into()));
        let error = detect(&V1.replace("rw,pids", "rw,cpuset")).unwrap_err();
        assert!(error.to_string().contains("pids"), "{error}");
        detect("").unwrap_err();
    }

    #[test]
    fn membership_is_checked_in_every_hierarchy() {
        let groups = Cgroups { layout: detect(V1).unwrap(), parent: "coppice-x".to_owned() };
        let inside = "4:memory:/coppice-x/vm-1\n2:cpu,cpuacct:/coppice-x/vm-1\n8:pids:/outer/coppice-x/vm-1\n0::/\n";
        groups.holds(inside, "vm-1").unwrap();
        assert!(groups.holds(inside, "vm-10").is_err());
        assert!(groups.holds(&inside.replace("8:pids:/outer/coppice-x/vm-1", "8:pids:/"), "vm-1").is_err());
        let v2 = Cgroups { layout: Layout::V2("/nowhere".into()), parent: "coppice-x".to_owned() };
        v2.holds("0::/coppice-x/vm-1\n", "vm-1").unwrap();
        v2.holds("0::/\n", "vm-1").unwrap_err();
    }

    #[test]
    fn a_group_has_its_limits_and_goes() {
        let id = format!("test-{}", std::process::id());
        let groups = match Cgroups::new(&id) {
            Ok(groups) => groups,
            Err(error) => return eprintln!("skipped, because cgroups can't be used: {error}"),
        };
        let limits = Limits { memory_bytes: 64 << 20, cpus: 2, processes: 30 };
        let group = groups.make("vm-7", &limits).unwrap();
        let dirs: Vec<PathBuf> = groups.hierarchies().into_iter().map(|(_, parent)| parent.join("vm-7")).collect();
        assert_eq!(group.procs.len(), dirs.len());
        let read = |file: &str| dirs.iter().find_map(|dir| std::fs::read_to_string(dir.join(file)).ok());
        assert_eq!(read("pids.max").unwrap().trim(), "30");
        let memory = read("memory.max").or_else(|| read("memory.limit_in_bytes")).unwrap();
        assert_eq!(memory.trim(), (64u64 << 20).to_string());
        let parents = groups.hierarchies().into_iter().map(|(_, dir)| dir).collect::<Vec<_>>();
        let second = groups.make("vm-8", &limits).unwrap();
        groups.remove("vm-8");
        assert!(parents.iter().all(|dir| dir.exists()));
        // As after a crash: the next one removes what no process is in.
        drop((group, second, groups));
        Cgroups::new(&id).unwrap();
        assert!(parents.iter().all(|dir| !dir.exists()));
    }
}
