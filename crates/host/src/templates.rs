//! Templates, as the host offers them.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use coppice_api::{ErrorClass, Template};
use coppice_disk::DataDir;
use coppice_engine::GuestKernel;
use coppice_image::CatalogError;
use coppice_snapshot::{MachineImage, MachineSpec};

use crate::host::Shared;
use crate::store::Store;
use crate::{Coded, HostError};

/// What an empty catalog has.
const NONE: &str = "none";

/// Why a template can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// There is none of this name.
    #[error("unknown template {name:?}: not in the template catalog, which has {known}")]
    NotFound {
        /// As it was asked for.
        name: String,
        /// Names that there are.
        known: String,
    },
    /// It is there, but can't be used.
    #[error("template {name:?} can't be used")]
    Broken {
        /// As it was asked for.
        name: String,
        /// Why.
        #[source]
        source: Box<CatalogError>,
    },
    /// It is offered to every workspace.
    #[error("template {0:?} belongs to the host: a client can't delete it")]
    Global(String),
    /// The catalog can't be read.
    #[error("the template catalog can't be read")]
    Catalog(#[source] Box<CatalogError>),
    /// A bug: the task that looked for it panicked.
    #[error("looking for the template was interrupted")]
    Interrupted,
}

impl Coded for TemplateError {
    fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "template_not_found",
            Self::Broken { .. } => "template_damaged",
            Self::Global(_) => "template_is_global",
            Self::Catalog(_) => "catalog_failed",
            Self::Interrupted => "interrupted",
        }
    }

    fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound { .. } => ErrorClass::NotFound,
            Self::Global(_) => ErrorClass::Forbidden,
            _ => ErrorClass::Internal,
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NotFound { known, .. } if known == NONE => Some("`coppice template build` makes templates".into()),
            Self::NotFound { .. } => Some("`coppice template list` shows what there is".into()),
            Self::Global(_) => {
                Some("an admin does: DELETE with `?global=true`, or `coppice template delete` on the host".into())
            }
            Self::Broken { name, .. } => Some(format!("`coppice template build {name}` makes it anew")),
            _ => None,
        }
    }
}

/// The catalog blocks: it is asked on a worker thread.
async fn ask<T: Send + 'static>(
    shared: &Shared,
    question: impl FnOnce(&coppice_image::Catalog) -> Result<T, TemplateError> + Send + 'static,
) -> Result<T, TemplateError> {
    let catalog = shared.catalog.clone();
    tokio::task::spawn_blocking(move || question(&catalog)).await.map_err(|_| TemplateError::Interrupted)?
}

fn current(catalog: &coppice_image::Catalog, name: &str) -> Result<coppice_image::Template, TemplateError> {
    catalog.current(name).map_err(|error| match error {
        CatalogError::NotFound { .. } | CatalogError::Name(_) => not_found(catalog, name),
        error => TemplateError::Broken { name: name.to_owned(), source: Box::new(error) },
    })
}

fn not_found(catalog: &coppice_image::Catalog, name: &str) -> TemplateError {
    let known = catalog.list().map(|all| all.into_keys().collect::<Vec<_>>().join(", "));
    let known = known.ok().filter(|known| !known.is_empty()).unwrap_or_else(|| NONE.into());
    TemplateError::NotFound { name: name.chars().take(64).collect(), known }
}

/// The baked machine of a template, verified, and the template's proper name.
pub(crate) async fn image(shared: &Shared, name: &str) -> Result<(Arc<MachineImage>, String), TemplateError> {
    let name = name.to_owned();
    ask(shared, move |catalog| {
        let template = current(catalog, &name)?;
        Ok((Arc::new(template.image), template.info.name))
    })
    .await
}

pub(crate) async fn list(shared: &Shared) -> Result<Vec<Template>, TemplateError> {
    ask(shared, |catalog| {
        let all = catalog.list().map_err(|e| TemplateError::Catalog(Box::new(e)))?;
        let usable = all.into_iter().filter_map(|(name, template)| match template {
            Ok(template) => Some(to_api(template)),
            Err(error) => {
                tracing::warn!(name, error = &error as &dyn std::error::Error, "a template can't be used");
                None
            }
        });
        Ok(usable.collect())
    })
    .await
}

pub(crate) async fn get(shared: &Shared, name: &str) -> Result<Template, TemplateError> {
    let name = name.to_owned();
    ask(shared, move |catalog| Ok(to_api(current(catalog, &name)?))).await
}

fn generations_in_use(shared: &Shared) -> HashSet<String> {
    shared.all().iter().filter_map(|entry| generation(&entry.record())).collect()
}

/// Removes generations that are neither current nor mapped by a running machine: what a new bake left behind. What can't
/// be removed only costs space.
pub(crate) async fn prune(shared: &Shared) {
    let in_use = generations_in_use(shared);
    let pruned = ask(shared, move |catalog| {
        let broken = |name: &str, e| TemplateError::Broken { name: name.to_owned(), source: Box::new(e) };
        let all = catalog.list().map_err(|e| TemplateError::Catalog(Box::new(e)))?;
        all.keys().map(|name| catalog.prune(name, &in_use).map_err(|e| broken(name, e))).collect::<Result<Vec<_>, _>>()
    })
    .await;
    match pruned {
        Ok(removed) => {
            let removed: Vec<String> = removed.into_iter().flatten().collect();
            if !removed.is_empty() {
                tracing::info!(?removed, "template generations that nothing uses any more");
            }
        }
        Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "old templates can't be removed"),
    }
}

/// Every template of this version is offered to every workspace, so that no client may remove one.
pub(crate) async fn delete(shared: &Shared, name: &str) -> Result<(), TemplateError> {
    let template = get(shared, name).await?;
    Err(TemplateError::Global(template.name))
}

/// What the operator of a host does: removes a template, also while the host serves. Generations whose memory file a
/// recorded machine maps stay until the next start finds them unused.
///
/// # Errors
/// No such template, or what the records or files said.
pub async fn delete_template(data: &DataDir, name: &str) -> Result<(), HostError> {
    let records = Store::open(&data.host_db()).await?.sandboxes().await?;
    let in_use: HashSet<String> = records.iter().filter_map(generation).collect();
    let (catalog, name) = (coppice_image::Catalog::new(data.clone()), name.to_owned());
    let deleted = tokio::task::spawn_blocking(move || remove(&catalog, name, &in_use));
    Ok(deleted.await.map_err(|_| TemplateError::Interrupted)??)
}

/// The same, asked for by an admin through the API.
pub(crate) async fn delete_global(shared: &Shared, name: &str) -> Result<(), TemplateError> {
    let (name, in_use) = (get(shared, name).await?.name, generations_in_use(shared));
    ask(shared, move |catalog| remove(catalog, name, &in_use)).await
}

fn remove(catalog: &coppice_image::Catalog, name: String, in_use: &HashSet<String>) -> Result<(), TemplateError> {
    catalog.delete(&name, in_use).map_err(|error| match error {
        CatalogError::NotFound { .. } => not_found(catalog, &name),
        source => TemplateError::Broken { name, source: Box::new(source) },
    })
}

/// `GEN` of `templates/NAME/GEN/snapshot/memory`.
fn generation(record: &crate::record::SandboxRecord) -> Option<String> {
    let memory = record.vm.as_ref()?.memory_base.as_ref()?;
    Some(memory.parent()?.parent()?.file_name()?.to_str()?.to_owned())
}

/// Kernel and initramfs by the ids in a manifest, which validated them as plain names. The engine says what is missing.
pub(crate) fn guest_kernel(data: &DataDir, machine: &MachineSpec) -> GuestKernel {
    let dir = data.kernels_dir().join(&machine.kernel);
    coppice_image::guest_kernel(data, &machine.kernel, &machine.initramfs)
        .unwrap_or_else(|_| GuestKernel { vmlinuz: dir.join("vmlinuz"), initramfs: dir.join(&machine.initramfs) })
}

fn to_api(template: coppice_image::Template) -> Template {
    let rootfs_path = template.rootfs().display().to_string();
    let info = template.info;
    let meta = BTreeMap::from([
        ("aliases".to_owned(), info.aliases.join(",")),
        ("baked_at".to_owned(), info.baked_at.to_string()),
        ("generation".to_owned(), info.generation),
        ("kernel".to_owned(), info.kernel),
        ("suite".to_owned(), info.suite),
    ]);
    Template {
        name: info.name,
        rootfs_path,
        size_bytes: template.size_bytes,
        cpu: info.cpus,
        memory_mb: info.memory_mib,
        is_global: true,
        workspace: String::new(),
        label: info.label,
        description: info.description,
        category: info.category,
        // A recipe takes over what it is based on: a baked template stands by itself.
        base: String::new(),
        tools: info.packages,
        meta,
    }
}
