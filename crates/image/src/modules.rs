//! Which kernel modules the guest needs, and the order they are loaded in, from `modules.dep` and `modules.builtin`.
//!
//! Pure text in, list out: it reads no files and knows nothing of compression.

use std::collections::{BTreeMap, BTreeSet};

/// What the guest cannot do without: its disk, its channel to the host, its root file system.
pub const REQUIRED: [&str; 4] = ["virtio_mmio", "virtio_blk", "virtio_console", "ext4"];
/// What it uses where the kernel has it. The `diag` ones end the connections that a copy of a machine has from its
/// original's address.
pub const OPTIONAL: [&str; 7] =
    ["virtio_net", "virtio_rng", "overlay", "vmw_vsock_virtio_transport", "inet_diag", "tcp_diag", "udp_diag"];

/// The module lists of a kernel package do not give what is needed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModulesError {
    /// A required module is neither a file nor built in.
    #[error("this kernel has no module {0}")]
    Missing(String),
    /// `modules.dep` names a module that has no line of its own.
    #[error("modules.dep is damaged: {0} is needed and not listed")]
    Damaged(String),
    /// Modules need each other in a circle.
    #[error("modules.dep is damaged: {0} needs itself")]
    Circle(String),
}

/// All that is asked for, in order.
pub fn wanted() -> impl Iterator<Item = &'static str> {
    REQUIRED.into_iter().chain(OPTIONAL)
}

/// `drivers/block/virtio_blk.ko.xz` is `virtio_blk`; dashes and underscores are the same to the kernel.
fn module_name(path: &str) -> Option<String> {
    let file = path.rsplit('/').next()?;
    let (stem, _) = file.split_once(".ko")?;
    Some(stem.replace('-', "_"))
}

/// Paths (as `modules.dep` has them) of everything that is needed for [`REQUIRED`] and [`OPTIONAL`], each after all that
/// it depends on.
///
/// # Errors
/// [`ModulesError`].
pub fn load_order(modules_dep: &str, modules_builtin: &str) -> Result<Vec<String>, ModulesError> {
    let needs: BTreeMap<&str, Vec<&str>> = modules_dep
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needed)| (path.trim(), needed.split_whitespace().collect()))
        .collect();
    let by_name: BTreeMap<String, &str> = needs.keys().filter_map(|path| Some((module_name(path)?, *path))).collect();
    let builtin: BTreeSet<String> = modules_builtin.lines().filter_map(module_name).collect();
    let mut order = Order { needs: &needs, done: Vec::new(), open: Vec::new() };
    for name in REQUIRED {
        match by_name.get(name) {
            Some(path) => order.visit(path)?,
            None if builtin.contains(name) => {}
            None => return Err(ModulesError::Missing(name.into())),
        }
    }
    for name in OPTIONAL {
        if let Some(path) = by_name.get(name) {
            order.visit(path)?;
        }
    }
    Ok(order.done.into_iter().map(str::to_owned).collect())
}

struct Order<'a> {
    needs: &'a BTreeMap<&'a str, Vec<&'a str>>,
    done: Vec<&'a str>,
    open: Vec<&'a str>,
}

impl<'a> Order<'a> {
    fn visit(&mut self, path: &'a str) -> Result<(), ModulesError> {
        if self.done.contains(&path) {
            return Ok(());
        }
        if self.open.contains(&path) {
            return Err(ModulesError::Circle(path.into()));
        }
        let needed = self.needs.get(path).ok_or_else(|| ModulesError::Damaged(path.into()))?;
        self.open.push(path);
        for below in needed {
            self.visit(below)?;
        }
        self.open.pop();
        self.done.push(path);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEP: &str = "\
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio_mmio.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/block/virtio_blk.ko.xz: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/char/virtio_console.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/char/hw_random/virtio-rng.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/unrelated.ko:
";

    #[test]
    fn each_module_comes_once_after_what_it_needs() {
        let order = load_order(DEP, "kernel/fs/ext4/ext4.ko\n").unwrap();
        let at = |name: &str| order.iter().position(|path| path.contains(name)).unwrap();
        assert!(at("virtio_ring.ko") < at("virtio/virtio.ko") && at("virtio/virtio.ko") < at("virtio_mmio"));
        assert_eq!(order.len(), 6, "{order:?}");
        assert!(order.iter().any(|path| path.ends_with("virtio_blk.ko.xz")));
        assert!(order.iter().any(|path| path.ends_with("virtio-rng.ko")), "dash and underscore are the same");
    }

    #[test]
    fn a_missing_required_module_is_named() {
        assert_eq!(load_order(DEP, ""), Err(ModulesError::Missing("ext4".into())));
    }

    #[test]
    fn damage_is_noticed() {
        let circle = "kernel/virtio_mmio.ko: kernel/a.ko\nkernel/a.ko: kernel/virtio_mmio.ko\n";
        assert!(matches!(load_order(circle, ""), Err(ModulesError::Circle(_))));
        assert!(matches!(load_order("kernel/virtio_mmio.ko: kernel/gone.ko\n", ""), Err(ModulesError::Damaged(_))));
    }

    proptest! {
        #[test]
        fn no_input_panics(dep in "([a-z_/.: \n]|virtio_mmio.ko){0,60}", builtin in "[a-z_/.\n]{0,60}") {
            drop(load_order(&dep, &builtin));
        }
    }
}
