//! Templates: the guest kernel and initramfs, root file systems from recipes, building and baking.
//!
//! | module | what it makes |
//! |---|---|
//! | [`kernel`], [`modules`] | the guest kernel and its modules, from Debian's package |
//! | [`initramfs`] | the agent and the modules as a cpio archive |
//! | [`recipe`] | templates as data |
//! | [`rootfs`], [`mirror`] | root file systems from recipes, in the [`cache`] |
//! | [`mod@bake`] | a booted, warmed, captured machine |
//! | [`catalog`] | the baked templates of a data directory |
//! | [`mod@prepare`] | all of it, as far as it is missing |
//!
//! Everything is content-addressed and made anew only when what it is made of changed. This crate runs at set-up and in
//! `coppice template`, never in the path of a sandbox request; it does not know sandboxes.
#![forbid(unsafe_code)]

pub mod bake;
pub mod cache;
pub mod catalog;
pub mod initramfs;
pub mod kernel;
pub mod mirror;
pub mod modules;
pub mod prepare;
pub mod recipe;
pub mod rootfs;

pub use bake::{BakeError, Ingredients, bake, reclaim};
pub use cache::{Cache, CacheError, DEFAULT_CACHE};
pub use catalog::{Catalog, CatalogError, Template, TemplateInfo};
pub use initramfs::{Initramfs, InitramfsError, guest_kernel, prepare_initramfs};
pub use kernel::{Kernel, KernelError, KernelInfo, prepare_kernel};
pub use prepare::{PrepareError, PrepareOptions, prepare};
pub use recipe::{Recipe, RecipeError, Recipes};
pub use rootfs::{Rootfs, RootfsError, prepare_rootfs};

use serde::Serialize;

/// 16 hex digits over the canonical JSON of a value. Maps are sorted, so that the same value gives the same digits.
fn short_hash(context: &str, value: &impl Serialize) -> String {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    // Writing to a hasher cannot fail, and the values have string keys only.
    serde_json::to_writer(&mut hasher, value).unwrap_or_default();
    hasher.finalize().to_hex().chars().take(16).collect()
}
