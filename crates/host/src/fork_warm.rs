//! Warm fork: one child takes its parent's place, with memory, disk, address and connections; the parent is stopped.
//!
//! The parent stands still from the capture on, and goes on only if there is no successor: never more than one of the two
//! runs. They share the parent's network slot, each in a seat of its own, and what comes for it goes to the parent's until the
//! parent's machine has ended. So nothing of a connection is lost with a child that fails, and what the parent had not received
//! is sent to the child again.
//!
//! The order is what makes it safe against a crash at any point: the child's record (still `creating`), its machine, its guest's
//! acknowledgement, then one transaction says that the parent is stopped and the child runs, then the parent's machine is
//! ended. Before that transaction the child is a stray that the next start ends before it lets the parent go on; after it the
//! parent's machine is the stray.
//!
//! It goes on when whoever asked for it has gone: what has moved is not deleted for want of a listener. The parent's record
//! names the successor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use coppice_api::{BootBreakdown, Fork, SandboxStatus};
use coppice_engine::{CapturePlan, Captured, GuestSession, JailSlot, Nic, Vm, VmState};
use coppice_guest_proto::v1::ResumeReason;
use coppice_net::SlotRecord;
use coppice_snapshot::PendingImage;
use tracing::{info, warn};
use uuid::Uuid;

use crate::actor::{Actor, Begin, Op, OpError, Owed, mailbox};
use crate::admission::Reservation;
use crate::api::ForkSpec;
use crate::entry::{AccessError, Entry};
use crate::fork::{self, ForkError, Order, check};
use crate::fork_tree::{breakdown, disk_clone_word};
use crate::hibernate::remove_files;
use crate::host::{Shared, remove_tree};
use crate::launch::{self, LaunchError, Origin, millis};
use crate::record::{ForkKind, SandboxRecord, SnapshotKind};
use crate::slots;
use crate::snapshots;
use crate::undo::Undo;

/// Why the machine of a stopped sandbox is not there.
pub(crate) const SUCCEEDED: &str = "another sandbox took its place";

/// What the child has, and what it does not.
const INHERITED: &str = "The child has taken the parent's place: its memory, running processes, open files and disk as of that \
                         instant, its network address and MAC address, what it may reach, and its connections to other \
                         machines, which go on. It does not have: the parent's sandbox id, hostname, machine-id, or random \
                         state of the kernel. The parent is stopped.";

pub(crate) async fn fork_warm(
    shared: &Arc<Shared>,
    workspace: &str,
    id: &str,
    spec: ForkSpec,
) -> Result<Fork, ForkError> {
    if spec.count != 1 {
        return Err(ForkError::OneChild(spec.count));
    }
    let parent = shared.entry(workspace, id)?;
    let order = check(shared, &parent, spec)?;
    let shared = Arc::clone(shared);
    let forked = tokio::spawn(async move {
        let _in_use = parent.in_use();
        // The parent goes, but for a while there are two machines.
        let room = order.admit(&shared, ForkKind::Warm).await?;
        parent.ask(|reply| Op::ForkWarm(Box::new((order, room)), reply)).await
    });
    forked.await.map_err(|_| ForkError::Interrupted)?
}

/// The child, whose guest has acknowledged: recorded as running in its parent's place.
struct Successor {
    record: SandboxRecord,
    vm: Arc<dyn Vm>,
    session: GuestSession,
    captured: Captured,
    image: Uuid,
    paused: Duration,
    /// Where the parent sits.
    before: SlotRecord,
}

impl Actor {
    /// What fails leaves the parent as it was, running.
    pub(crate) async fn fork_warm(&mut self, order: Order, room: Reservation) -> Result<Fork, ForkError> {
        self.awake().await?;
        self.require(&[SandboxStatus::Running])?;
        self.hold().await?;
        let before = self.entry.live();
        // Whoever needs the machine waits from now on, until it is known which one that is.
        self.entry.set_live(|live| live.session = None);
        let mut undo = Undo::default();
        match self.find_successor(&order, &mut undo).await {
            Ok(successor) => {
                undo.commit();
                metrics::counter!("coppice_fork_children_total", "outcome" => "ok").increment(1);
                Ok(self.step_down(&order, successor, room).await)
            }
            Err(e) => {
                undo.unwind().await;
                metrics::counter!("coppice_fork_children_total", "outcome" => "failed").increment(1);
                self.stay(before).await;
                Err(e)
            }
        }
    }

    async fn find_successor(&mut self, order: &Order, undo: &mut Undo) -> Result<Successor, ForkError> {
        let (id, shared) = (self.id(), Arc::clone(&self.shared));
        let parent = self.entry.record();
        // What runs has a place on the network.
        let before = parent.network.clone().ok_or(AccessError::NoSession(id))?;
        let slot = slots::reseat(&shared, before.index).await.map_err(|e| no_child(e.into()))?;
        let (unseat, index, seat) = (Arc::clone(&shared), slot.index, slot.seat);
        undo.push("seat", async move { slots::unseat(&unseat, index, seat).await });
        coppice_fault::point!("fork-warm.seat");

        let image_id = Uuid::new_v4();
        let image = PendingImage::create(&shared.snapshot_dir(image_id))?;
        undo.push("image", remove_tree(shared.snapshot_dir(image_id)));
        let network = slots::record(&slot, &parent.egress);
        let mut record = order.successor(&parent, image_id, network).ok_or(ForkError::Interrupted)?;
        // Before the machine stands still: nothing is done then that could be done before.
        launch::record_intent(&shared, &record, undo).await?;
        coppice_fault::point!("fork-warm.intended");
        let begun = Instant::now();
        self.vm.pause().await.map_err(|source| OpError::Vm { id, what: "forked", source })?;
        coppice_fault::point!("fork-warm.paused");
        // A capture of a machine that stands still leaves it so.
        let plan = CapturePlan { image, id: image_id, durable: false, hold: None };
        let captured = self.vm.capture(plan).await.map_err(|source| OpError::Capture { id, source })?;

        coppice_fault::point!("fork-warm.captured");
        let nic = Nic { tap: Arc::clone(&slot.tap), mac: slot.mac };
        let jail = JailSlot::of(slot.index, slot.seat).ok_or(AccessError::NoSession(id))?;
        let origin = Origin::Image(Arc::new(captured.image.clone()));
        let started = start(&shared, &mut record, &origin, (nic, jail), undo).await;
        let (vm, session) = started.map_err(no_child)?;
        coppice_fault::point!("fork-warm.acknowledged");
        let took = order.requested.elapsed().as_millis();
        record.boot_ms = u64::try_from(took).unwrap_or(u64::MAX);
        self.record_succession(&parent, &record, &captured, image_id).await?;
        coppice_fault::point!("fork-warm.recorded");
        Ok(Successor { record, vm, session, captured, image: image_id, paused: begun.elapsed(), before })
    }

    /// From here on the child is the machine.
    async fn record_succession(
        &self,
        parent: &SandboxRecord,
        child: &SandboxRecord,
        captured: &Captured,
        image_id: Uuid,
    ) -> Result<(), ForkError> {
        let image = snapshots::record_of(parent, &captured.image, SnapshotKind::Fork).await;
        let mut former = SandboxRecord { last_used_at: self.entry.last_used(), ..parent.clone() };
        former.succeeded_by(child.id);
        if let Err(e) = self.shared.store.put_succession(&former, child, &image).await {
            // A disk that did not answer in time may have written it all the same: the records must say what is.
            if let Err(e) = self.shared.store.undo_succession(parent, child.id, image_id).await {
                warn!(error = &e as &dyn std::error::Error, "whose place it is could not be recorded");
            }
            return Err(e.into());
        }
        Ok(())
    }

    /// The successor is recorded. What the parent held goes, then the child is shown: nobody gives its slot back before.
    async fn step_down(&mut self, order: &Order, successor: Successor, room: Reservation) -> Fork {
        let Successor { record, vm, session, captured, image, paused, before } = successor;
        let shared = Arc::clone(&self.shared);
        self.entry.update(|parent| parent.succeeded_by(record.id));
        self.entry.set_live(|live| (live.status, live.session) = (SandboxStatus::Stopped, None));
        self.owed = Some(Owed::Seat(before.index, before.seat));
        if let Err(e) = self.end_machine(SUCCEEDED).await {
            warn!(
                error = &e as &dyn std::error::Error,
                "the machine of a sandbox that was succeeded can't be ended yet"
            );
            // It stands still all the same; the child needs the network.
            self.give_back().await;
        }
        keep_log_only(&shared, self.id()).await;
        coppice_fault::point!("fork-warm.ended");
        let (sender, receiver) = mailbox();
        let entry = Entry::new(record, Some(session), sender);
        entry.set_disk_len(captured.image.manifest().disk.len);
        room.settle(|| shared.insert(Arc::clone(&entry)));
        let child = entry.record().to_api();
        Actor::spawn(Arc::clone(&shared), entry, vm, receiver, Begin::AsItIs);
        if let Err(e) = shared.drop_unreferenced_snapshots().await {
            warn!(error = &e as &dyn std::error::Error, "images that are no longer needed stay until the next start");
        }
        let (parent_paused_ms, took_ms) = (millis(paused), millis(order.requested.elapsed()));
        info!(child = child.id, parent_paused_ms, memory_bytes = captured.memory_bytes, took_ms, "warm fork");
        metrics::histogram!("coppice_fork_paused_seconds").record(paused.as_secs_f64());
        metrics::histogram!("coppice_fork_seconds").record(order.requested.elapsed().as_secs_f64());
        Fork {
            children: vec![child],
            errors: Vec::new(),
            parent_id: order.parent.id.to_string(),
            snapshot_id: Some(image.to_string()),
            tree_id: order.tree_id.to_string(),
            at: captured.image.manifest().captured_at.to_string(),
            parent_paused_ms,
            disk_clone: disk_clone_word(captured.disk_clone),
            flushed: true,
            mode: "warm".into(),
            inherited: INHERITED.into(),
            memory_bytes: captured.memory_bytes,
            memory_written_bytes: captured.memory_written_bytes,
            capture: Some(breakdown(&captured.timings)),
        }
    }
}

/// Of a stopped sandbox only the console's log stays: whatever else there is of it is its successor's, or nobody's.
pub(crate) async fn keep_log_only(shared: &Shared, id: Uuid) {
    remove_files(shared, id).await;
    let dir = shared.sandbox_dir(id);
    let Ok(mut entries) = tokio::fs::read_dir(&dir).await else { return };
    while let Ok(Some(entry)) = entries.next_entry().await {
        if entry.file_name() != launch::CONSOLE_LOG
            && let Err(e) = tokio::fs::remove_file(entry.path()).await
        {
            warn!(path = %entry.path().display(), error = %e, "can't be removed");
        }
    }
}

fn no_child(source: LaunchError) -> ForkError {
    ForkError::NoChild { count: 1, source }
}

/// A machine whose guest has acknowledged; `record` says that it runs, and is not stored so yet.
async fn start(
    shared: &Arc<Shared>,
    record: &mut SandboxRecord,
    origin: &Origin,
    devices: (Nic, JailSlot),
    undo: &mut Undo,
) -> Result<(Arc<dyn Vm>, GuestSession), LaunchError> {
    let since = Instant::now();
    let place = launch::make_place(shared, record.id, origin).await?;
    let mut boot = BootBreakdown { prepare: millis(since.elapsed()), ..BootBreakdown::default() };
    let vm = launch::start_vm(shared, origin, place, devices, &mut boot, undo).await?;
    let fork = fork::identity(record);
    let session = launch::acknowledge(&vm, record, origin, ResumeReason::Fork, fork, &mut boot).await?;
    // One that has died since is no successor.
    if let VmState::Dead(reason) = vm.state().borrow().clone() {
        return Err(coppice_engine::SessionError::Dead { reason }.into());
    }
    (record.status, record.vm, record.boot) = (SandboxStatus::Running, Some(vm.record()), Some(boot));
    record.last_used_at = jiff::Timestamp::now();
    Ok((vm, session))
}
