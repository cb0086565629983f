//! Who a command runs as: a bounded reader of the sandbox's `/etc/passwd` and `/etc/group`.
//!
//! No NSS: a static binary can't load its modules, and the sandbox's files are the only source of users here.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use rustix::fs::{Gid, Uid};
use tonic::Status;

/// More of these files than this is not read.
const MAX_FILE: u64 = 1 << 20;
/// Most supplementary groups (`NGROUPS_MAX` is 65536; nobody has that many).
const MAX_GROUPS: usize = 1024;

/// An account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub name: String,
    pub uid: Uid,
    pub gid: Gid,
    pub groups: Vec<Gid>,
    pub home: PathBuf,
}

/// Looks a user up by name or uid; the empty string is root. A uid without an entry is fine, a name is not.
pub(crate) fn find(root: &Path, wanted: &str) -> Result<User, Status> {
    let wanted = if wanted.is_empty() { "0" } else { wanted };
    let passwd = read(&root.join("etc/passwd"))?;
    let groups = read(&root.join("etc/group"))?;
    lookup(&passwd, &groups, wanted)
        .ok_or_else(|| Status::invalid_argument(format!("there is no user {wanted:?} in the sandbox")))
}

fn read(path: &Path) -> Result<String, Status> {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes)) {
        Ok(_) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(crate::status::from_io(&path.display(), &error)),
    }
}

/// Numeric ids, except the one that means "unchanged" to the kernel.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|&id| id != u32::MAX)
}

fn lookup(passwd: &str, group: &str, wanted: &str) -> Option<User> {
    let number = id(wanted);
    let entry = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _password, uid) = (fields.next()?, fields.next()?, id(fields.next()?)?);
        if name.is_empty() || (name != wanted && Some(uid) != number) {
            return None;
        }
        let gid = id(fields.next()?)?;
        let home = fields.nth(1).filter(|home| home.starts_with('/')).unwrap_or("/");
        Some((name.to_owned(), uid, gid, PathBuf::from(home)))
    });
    let (name, uid, gid, home) = match (entry, number) {
        (Some(entry), _) => entry,
        (None, Some(0)) => ("root".to_owned(), 0, 0, PathBuf::from("/root")),
        (None, Some(uid)) => (uid.to_string(), uid, uid, PathBuf::from("/")),
        (None, None) if wanted == "root" => ("root".to_owned(), 0, 0, PathBuf::from("/root")),
        (None, None) => return None,
    };
    let mut groups = vec![Gid::from_raw(gid)];
    groups.extend(group.lines().filter_map(|line| member(line, &name)).filter(|&g| g != gid).map(Gid::from_raw));
    groups.truncate(MAX_GROUPS);
    Some(User { name, uid: Uid::from_raw(uid), gid: Gid::from_raw(gid), groups, home })
}

/// The gid of a line of `/etc/group` that lists `name` as a member.
fn member(line: &str, name: &str) -> Option<u32> {
    let mut fields = line.split(':');
    let gid = id(fields.nth(2)?)?;
    fields.next()?.split(',').any(|member| member == name).then_some(gid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbad line\nann:x:1000:1000:Ann,,,:/home/ann:/bin/sh\nnohome:x:7:7::relative:\n";
    const GROUP: &str = "root:x:0:\nann:x:1000:\nsudo:x:27:bob,ann\nother:x:28:bob\nx:y\n";

    #[test]
    fn by_name_and_by_number() {
        let ann = lookup(PASSWD, GROUP, "ann").unwrap();
        assert_eq!((ann.uid.as_raw(), ann.gid.as_raw(), ann.home.as_path()), (1000, 1000, Path::new("/home/ann")));
        assert_eq!(ann.groups.iter().map(|g| g.as_raw()).collect::<Vec<_>>(), [1000, 27]);
        assert_eq!(lookup(PASSWD, GROUP, "1000"), Some(ann));
        assert_eq!(lookup(PASSWD, GROUP, "nohome").unwrap().home, Path::new("/"));
    }

    #[test]
    fn unknown_names_are_refused_and_unknown_numbers_are_not() {
        assert_eq!(lookup(PASSWD, GROUP, "eve"), None);
        assert_eq!(lookup(PASSWD, GROUP, "4294967295"), None);
        assert_eq!(lookup(PASSWD, GROUP, "4242").unwrap().gid.as_raw(), 4242);
        assert_eq!(lookup("", "", "root").unwrap().home, Path::new("/root"));
    }

    proptest! {
        #[test]
        fn no_file_makes_it_panic(passwd in "[a:,0-9\n/]{0,80}", group in "[a:,0-9\n]{0,80}", name in "[a0-9:,]{0,4}") {
            drop(lookup(&passwd, &group, &name));
        }
    }
}
