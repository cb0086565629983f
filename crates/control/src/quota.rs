//! Whether a workspace may have what a request would make: decided before anything is made, and exact.
//!
//! What a workspace has is what the host says, so a restart forgets nothing and a sandbox that was reaped counts no more.
//! What is just being made is promised here. The two must not be mixed up: a child of a fork is known to the host before
//! its fork is answered, and would then count twice. So each account knows which ids were answered (settled): of what
//! the host lists only those count, and the rest is in the promises.
//!
//! Making goes on in a task of its own when the client hangs up, and what it made is then deleted: until that is done the
//! promise stands, so that hanging up is no way around a quota.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use coppice_api::{CreateSandboxRequest, ErrorClass, Fork, Quota, Sandbox, Snapshot, Usage};
use coppice_host::{Held, Holdings, HostApi};
use tracing::Instrument as _;

use crate::Control;
use crate::auth::Caller;
use crate::error::ApiError;

/// The accounts of all workspaces.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    accounts: Mutex<HashMap<String, Arc<Account>>>,
}

#[derive(Debug, Default)]
struct Account {
    /// Held while what the host lists is compared with what is promised, and while a promise is settled.
    turn: tokio::sync::Mutex<()>,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    promised: Usage,
    /// What was answered; `None` while there are no limits, for which nobody needs to know.
    settled: Option<HashSet<String>>,
}

impl Account {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a request would make.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wish<'a> {
    /// One sandbox.
    Create(&'a CreateSandboxRequest),
    /// So many children of a sandbox.
    Fork(&'a str, u64),
    /// One child of a sandbox, which takes its place: the workspace has no more of anything afterwards. While there are two both
    /// count for others.
    Successor(&'a str),
    /// A snapshot of a sandbox.
    Snapshot(&'a str),
}

/// A promise. Taken back when it is dropped.
#[derive(Debug)]
struct Promise {
    account: Arc<Account>,
    what: Usage,
}

impl Promise {
    /// It was kept: these are there now.
    async fn settle(self, ids: Vec<String>) {
        let account = Arc::clone(&self.account);
        let _turn = account.turn.lock().await;
        if let Some(settled) = &mut account.book().settled {
            settled.extend(ids);
        }
        drop(self);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut book = self.account.book();
        book.promised = minus(book.promised, self.what);
    }
}

impl Quotas {
    fn account(&self, workspace: &str) -> Arc<Account> {
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(accounts.entry(workspace.to_owned()).or_default())
    }

    /// Runs `delete` while nothing is being made in the workspace, if nothing is in it.
    pub(crate) async fn while_empty<T>(
        &self,
        host: &dyn HostApi,
        workspace: &str,
        delete: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let account = self.account(workspace);
        let _turn = account.turn.lock().await;
        let holds = usage(&host.holdings(workspace).await?);
        let promised = account.book().promised;
        if promised != Usage::default() || holds.sandboxes + holds.snapshots > 0 {
            let message = format!(
                "workspace {workspace} is not empty: it has {} sandbox(es) and {} snapshot(s)",
                holds.sandboxes + promised.sandboxes,
                holds.snapshots + promised.snapshots
            );
            return Err(ApiError::new(ErrorClass::Conflict, "workspace_not_empty", message)
                .hint("delete them first, with a token of that workspace"));
        }
        delete.await
    }

    async fn promise(&self, control: &Control, workspace: &str, wish: Wish<'_>) -> Result<Promise, ApiError> {
        let account = self.account(workspace);
        let _turn = account.turn.lock().await;
        let quota = quota(control, workspace).await?;
        if let (Wish::Fork(_, count), Some(most)) = (wish, quota.fan_out)
            && count > most
        {
            let message =
                format!("max fan-out exceeded: {count} children were asked for, and one fork may make {most}");
            return Err(exceeded(message));
        }
        let bounded = Quota { fan_out: None, ..quota.clone() } != Quota::default();
        let what = if bounded {
            let holdings = control.host().holdings(workspace).await?;
            let what = size(control, workspace, wish, &holdings).await?;
            let mut book = account.book();
            let there = counted(&mut book, holdings);
            if !matches!(wish, Wish::Successor(_)) {
                check(&quota, plus(there, book.promised), what)?;
            }
            book.promised = plus(book.promised, what);
            what
        } else {
            let mut book = account.book();
            let what = number(wish);
            book.settled = None;
            book.promised = plus(book.promised, what);
            what
        };
        Ok(Promise { account: Arc::clone(&account), what })
    }
}

/// What a workspace has, as the host says.
pub(crate) fn usage(holdings: &Holdings) -> Usage {
    let sum = |all: &[Held], of: fn(&Held) -> u64| all.iter().map(of).fold(0_u64, u64::saturating_add);
    Usage {
        sandboxes: length(&holdings.sandboxes),
        memory_mb: sum(&holdings.sandboxes, |held| held.memory_mib),
        snapshots: length(&holdings.snapshots),
        disk_mb: sum(&holdings.sandboxes, |held| held.disk_mib)
            .saturating_add(sum(&holdings.snapshots, |held| held.disk_mib)),
    }
}

/// Of what the host lists, what no promise stands for.
fn counted(book: &mut Book, mut holdings: Holdings) -> Usage {
    let all: HashSet<String> =
        holdings.sandboxes.iter().chain(&holdings.snapshots).map(|held| held.id.clone()).collect();
    // Without a record of what was answered everything counts: exactly so when nothing is being made, and rather twice
    // than not at all when something is.
    let settled = book.settled.get_or_insert_with(|| all.clone());
    settled.retain(|id| all.contains(id));
    holdings.sandboxes.retain(|held| settled.contains(&held.id));
    holdings.snapshots.retain(|held| settled.contains(&held.id));
    usage(&holdings)
}

async fn quota(control: &Control, workspace: &str) -> Result<Quota, ApiError> {
    let Some(store) = control.store() else { return Ok(Quota::default()) };
    match store.workspace(workspace).await? {
        Some(row) => Ok(row.quota),
        // Deleted since the token was looked at, and its tokens with it.
        None => Err(ApiError::unauthorized("the token is not valid: its workspace was deleted")),
    }
}

fn number(wish: Wish<'_>) -> Usage {
    match wish {
        Wish::Create(_) | Wish::Successor(_) => Usage { sandboxes: 1, ..Usage::default() },
        Wish::Fork(_, count) => Usage { sandboxes: count, ..Usage::default() },
        Wish::Snapshot(_) => Usage { snapshots: 1, ..Usage::default() },
    }
}

async fn size(control: &Control, workspace: &str, wish: Wish<'_>, holdings: &Holdings) -> Result<Usage, ApiError> {
    let source = |id: &str| {
        // One that is not there, or that another one took the place of, holds nothing; the host says which it is, and makes nothing.
        holdings.sandboxes.iter().find(|held| held.id == id).cloned().unwrap_or_default()
    };
    Ok(match wish {
        Wish::Create(request) => {
            let new = control.host().size_of_new(workspace, request).await?;
            Usage { memory_mb: new.memory_mib, disk_mb: new.disk_mib, ..number(wish) }
        }
        Wish::Successor(id) => {
            let parent = source(id);
            Usage { memory_mb: parent.memory_mib, disk_mb: parent.disk_mib, ..number(wish) }
        }
        Wish::Fork(id, count) => {
            let parent = source(id);
            let times = |each: u64| each.saturating_mul(count);
            Usage { memory_mb: times(parent.memory_mib), disk_mb: times(parent.disk_mib), ..number(wish) }
        }
        Wish::Snapshot(id) => {
            let from = source(id);
            Usage { disk_mb: from.disk_mib.saturating_add(from.memory_mib), ..number(wish) }
        }
    })
}

fn check(quota: &Quota, has: Usage, more: Usage) -> Result<(), ApiError> {
    let limits = [
        ("sandboxes", quota.sandboxes, has.sandboxes, more.sandboxes),
        ("MiB of memory", quota.memory_mb, has.memory_mb, more.memory_mb),
        ("snapshots", quota.snapshots, has.snapshots, more.snapshots),
        ("MiB of disk", quota.disk_mb, has.disk_mb, more.disk_mb),
    ];
    for (what, most, has, more) in limits {
        if let Some(most) = most
            && more > 0
            && has.saturating_add(more) > most
        {
            let message =
                format!("max {what} reached: the workspace has {has} of {most}, and {more} more were asked for");
            return Err(exceeded(message));
        }
    }
    Ok(())
}

fn exceeded(message: String) -> ApiError {
    ApiError::new(ErrorClass::Quota, "quota_exceeded", message)
        .hint("delete what is no longer needed; an admin changes limits with `coppice workspace set-quota`")
}

fn length<T>(all: &[T]) -> u64 {
    u64::try_from(all.len()).unwrap_or(u64::MAX)
}

fn plus(a: Usage, b: Usage) -> Usage {
    Usage {
        sandboxes: a.sandboxes.saturating_add(b.sandboxes),
        memory_mb: a.memory_mb.saturating_add(b.memory_mb),
        snapshots: a.snapshots.saturating_add(b.snapshots),
        disk_mb: a.disk_mb.saturating_add(b.disk_mb),
    }
}

fn minus(a: Usage, b: Usage) -> Usage {
    Usage {
        sandboxes: a.sandboxes.saturating_sub(b.sandboxes),
        memory_mb: a.memory_mb.saturating_sub(b.memory_mb),
        snapshots: a.snapshots.saturating_sub(b.snapshots),
        disk_mb: a.disk_mb.saturating_sub(b.disk_mb),
    }
}

/// What can be made under a quota.
pub(crate) trait Made: Send + 'static {
    /// Ids of the new sandboxes or snapshots.
    fn ids(&self) -> Vec<String>;
    /// Whether what nobody waits for any more is deleted. A snapshot is kept: it is whole, and listed. So is the child of a warm
    /// fork, which its parent names.
    const UNDONE: bool;
}

impl Made for Sandbox {
    const UNDONE: bool = true;
    fn ids(&self) -> Vec<String> {
        vec![self.id.clone()]
    }
}

impl Made for Fork {
    const UNDONE: bool = true;
    fn ids(&self) -> Vec<String> {
        self.children.iter().map(|child| child.id.clone()).collect()
    }
}

/// A warm fork: its one child is the machine that the parent was.
pub(crate) struct Moved(pub Fork);

impl Made for Moved {
    const UNDONE: bool = false;
    fn ids(&self) -> Vec<String> {
        self.0.ids()
    }
}

impl Made for Snapshot {
    const UNDONE: bool = false;
    fn ids(&self) -> Vec<String> {
        vec![self.id.clone()]
    }
}

/// Something that was made and that nobody has yet. Dropping it deletes it.
struct Unclaimed<T: Made> {
    made: Option<T>,
    control: Control,
    workspace: String,
}

impl<T: Made> Drop for Unclaimed<T> {
    fn drop(&mut self) {
        let (Some(made), true, Ok(runtime)) = (self.made.take(), T::UNDONE, tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let (control, workspace, ids) = (self.control.clone(), self.workspace.clone(), made.ids());
        drop(runtime.spawn(async move {
            for id in ids {
                if let Err(error) = control.host().delete(&workspace, &id).await
                    && error.class() != ErrorClass::NotFound
                {
                    tracing::warn!(id, %error, "a sandbox that nobody waits for could not be deleted");
                }
            }
        }));
    }
}

/// Makes something if the caller's workspace may have it.
pub(crate) async fn make<T, F>(
    control: &Control,
    caller: &Caller,
    wish: Wish<'_>,
    work: impl FnOnce(Control, String) -> F,
) -> Result<T, ApiError>
where
    T: Made,
    F: Future<Output = Result<T, ApiError>> + Send + 'static,
{
    let workspace = caller.workspace().to_owned();
    let promise = control.quotas().promise(control, &workspace, wish).await?;
    let work = work(control.clone(), workspace.clone());
    let control = control.clone();
    let task = async move {
        let made = work.await?;
        promise.settle(made.ids()).await;
        Ok(Unclaimed { made: Some(made), control, workspace })
    };
    let made: Result<Unclaimed<T>, ApiError> = tokio::spawn(task.in_current_span()).await.map_err(|error| {
        tracing::error!(error = &error as &dyn std::error::Error, "making a sandbox or snapshot broke off");
        ApiError::new(ErrorClass::Internal, "internal", "internal error: a request handler failed")
    })?;
    made?.made.take().ok_or_else(|| ApiError::new(ErrorClass::Internal, "internal", "internal error"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(id: &str) -> Held {
        Held { id: id.into(), memory_mib: 512, disk_mib: 1024 }
    }

    #[test]
    fn what_a_promise_stands_for_is_not_counted_twice() {
        let mut book = Book { settled: Some(["old".to_owned(), "gone".to_owned()].into()), ..Book::default() };
        let holdings = Holdings { sandboxes: vec![held("old"), held("child-of-a-running-fork")], snapshots: vec![] };
        let expected = Usage { sandboxes: 1, memory_mb: 512, snapshots: 0, disk_mb: 1024 };
        assert_eq!(counted(&mut book, holdings), expected);
        assert_eq!(book.settled.unwrap(), ["old".to_owned()].into());
        // After a start everything that is there counts.
        let mut book = Book::default();
        let holdings = Holdings { sandboxes: vec![held("a")], snapshots: vec![held("b")] };
        assert_eq!(counted(&mut book, holdings).disk_mb, 2048);
    }

    #[test]
    fn limits_are_inclusive_and_only_what_grows_is_checked() {
        let quota = Quota { sandboxes: Some(2), snapshots: Some(0), ..Quota::default() };
        let has = Usage { sandboxes: 1, snapshots: 5, ..Usage::default() };
        let one = Usage { sandboxes: 1, memory_mb: 1 << 40, ..Usage::default() };
        assert!(check(&quota, has, one).is_ok());
        let error = check(&quota, Usage { sandboxes: 2, ..has }, one).unwrap_err();
        assert_eq!(error.code(), "quota_exceeded");
        assert!(error.message().starts_with("max sandboxes reached"), "{}", error.message());
        assert!(check(&quota, has, Usage { snapshots: 1, ..Usage::default() }).is_err());
    }
}
