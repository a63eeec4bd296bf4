"""Lists every collection of the extender that can grow, with its bound in bytes.

``tests/test_bounded.py`` compares the list with the code. Sizes are upper bounds of memory in
CPython, keys included. A string that another structure holds as well counts as a reference. The
size of Kubernetes objects is limited by ``contract.pod_limits`` and ``extender.state.kept_fields``.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Per:
    """Grows with the cluster: at most ``most_bytes`` for each object of this kind.

    Objects are those of the cluster and those that a GPUNode names.
    """

    kind: str
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """At most ``most_bytes`` in total, for any cluster."""

    most_bytes: int


#: Permanent collections: module -> attribute -> bound.
GROWS: dict[str, dict[str, Per | Fixed]] = {
    "extender/admission/context.py": {
        "ObjectCache._namespaces": Per("namespace", 4_000),
        "ObjectCache._nodes": Per("node", 64 << 10),
        "ObjectCache._statuses": Per("reservation or device", 8_000),
        "ObjectCache._with_choice": Per("node", 200),
    },
    "extender/recorder/book.py": {
        "ProfileBook._entries": Per("VRAMProfile", 256 << 10),
        "_Entry.pending": Fixed(0),  # with its entry, at most MAX_PENDING
        "_Entry.running": Fixed(0),
        "_Entry.written": Fixed(0),
    },
    "extender/recorder/past_lives.py": {
        "PastLives._lives": Fixed(20_000 * 200 * 400),  # until their owners run, at most 14 days
        "_Pods._ended": Fixed(0),  # while the answers of Prometheus are read
        "_Pods._killed": Fixed(0),
        "_Pods._nodes": Fixed(0),
        "_Pods._owners": Fixed(0),
        "_Pods.images": Fixed(0),
    },
    "extender/recorder/pod_facts.py": {
        "PodFacts.ends": Fixed(0),  # with its pod, whose containers are limited
        "PodFacts.programs": Fixed(0),
    },
    "extender/recorder/kube_profiles.py": {"OwnerReader._ends": Fixed(20_000 * 1_500)},
    "extender/recorder/rounds.py": {
        "Observed._gone": Fixed(10_000 * 4_000),
        "Observed._pods": Per("pod with a GPU", 4_000),
        "Observed._reports": Per("node", 64 << 10),
        "Recorder._known": Per("controller of pods on GPUs", 1_000),
        "Recorder._unowned": Fixed(10_000 * 1_000),
    },
    "extender/recorder/life_tracker.py": {
        "LifeTracker._open": Per("container on a GPU", 1_000),
        # Until its pod is gone, or the next life ends.
        "LifeTracker._ended": Per("container on a GPU", 250),
    },
    # MAX_BUCKETS, MAX_PROGRAMS and MAX_CONTAINERS bound what is kept of an owner.
    "extender/recommend/histogram.py": {"Histogram.weights": Fixed(0)},
    "extender/recommend/profile.py": {
        "ContainerProfile.tracks": Fixed(0),
        "Profile.containers": Fixed(0),
    },
    "extender/kube/profiles.py": {
        "Profiles._found_by": Per("VRAMProfile", 4_000),
        "Profiles._profiles": Per("VRAMProfile", 512 << 10),
    },
    "extender/state/dra_allocation.py": {
        "DraAllocation._claims": Per("ResourceClaim", 4_000),
        "DraAllocation._classes": Per("DeviceClass", 1_500),
        "DraAllocation._slices": Per("device", 500),
        "DraAllocation._slices_on": Per("node", 500),
        "DraAllocation.resources": Per("DeviceClass", 500),
    },
    # Slices, claims and holdings have a few hundred bytes for each device that they name.
    "extender/state/claimed_devices.py": {
        "ClaimedDevices._claims": Per("ResourceClaim", 4_000),
        "ClaimedDevices._holdings": Per("ResourceClaim", 1_000),
        "ClaimedDevices._lingering": Fixed(1_000 * 16 * 500),
        "ClaimedDevices._pools": Per("node", 500),
        "ClaimedDevices._slices": Per("device", 500),
        "ClaimedDevices._slices_of": Per("node", 500),
    },
    "extender/state/taint_decisions.py": {
        "TaintDecisions._former": Fixed(1_000 * 400),
        "TaintDecisions._taints": Fixed(100 * 500),
    },
    "extender/controllers/device_taints.py": {
        "DeviceTaintsController._again_until_s": Per("node", 200),
        "DeviceTaintsController._devices": Per("device", 300),
        "DeviceTaintsController._excess_bytes": Per("device", 200),
        "Reports._changed": Per("node", 200),
        "Reports._reports": Per("node", 64 << 10),
        "Reports._seen_at_s": Per("node", 200),
    },
    "extender/state/sm_activity.py": {
        "Activities._history": Per("device", 600),
        "Activities._gpus_of": Per("node", 500),
        "Activities._node_of": Per("device", 200),
    },
    "extender/state/foreign_allocators.py": {
        "ForeignAllocators._keys_of": Per("pod, node or slice", 400),
        "ForeignAllocators._managers": Per("node", 300),
        "ForeignAllocators._traces": Per("pod, node or slice", 800),
    },
    "extender/state/eviction_candidates.py": {
        "BackOffs._last": Per("node", 300),
        "BackOffs._marked": Per("reservation", 300),
        "BackOffs._until_s": Per("node", 200),
    },
    "extender/state/deleted_pods.py": {
        "DeletedPods._gone_since_s": Per("reservation", 300),
        "DeletedPods._marks": Per("reservation", 300),
        "DeletedPods._seen": Fixed(10_000 * 500),
    },
    "extender/state/request_drift.py": {"RequestDrift._changed": Per("pod", 2_000)},
    "extender/state/heartbeats.py": {
        "Heartbeats._leases": Per("node", 500),
        "Heartbeats._reports": Per("node", 300),
        "Heartbeats._vouches": Per("node", 800),
        "Heartbeats.revived": Per("node", 200),
    },
    "extender/state/nominations.py": {"Nominations._holds": Per("pod", 500)},
    # Limited together: MAX_NODE_ENTRIES entries for each node, and MAX_ENTRIES in total.
    "extender/state/prediction_tracker.py": {
        "PredictionTracker._done": Fixed(262_144 * 200),
        "PredictionTracker._fresh": Per("node", 300),
        "PredictionTracker._nodes": Fixed(262_144 * 600),
        "PredictionTracker.misses": Fixed(200 * 10_000),
        "PredictionTracker.totals": Fixed(10_000),
        "_TrackedNode.baselines": Fixed(0),
        "_TrackedNode.pending": Fixed(0),
        "_TrackedNode.reservations": Fixed(0),
        "_TrackedNode.settled": Fixed(0),
        "_Baseline.unreserved_pods": Fixed(0),
        "_Baseline.changes": Fixed(0),
        "_Baseline.reservations": Fixed(0),
    },
    "extender/state/overuse.py": {
        "Overcommits._of_node": Per("device", 1_000),
        "Overuses._decided": Per("node", 100),
        "Overuses._of_node": Per("pod on a device", 800),
        "Overuses._overcommitted": Per("node", 100),
        "Overuses._rejected": Per("pod on a device", 300),
        "Overuses._since_s": Per("pod on a device", 300),
    },
    "extender/state/starting_nodes.py": {"StartingNodes._nodes": Per("node", 100)},
    # Only pods with affinity between pods have entries; the limits per pod bound their number.
    "extender/state/pod_selectors.py": {
        "Budgets._held": Per("PodDisruptionBudget", 64 << 10),
        "Neighbours._terms_of": Per("pod", 64 << 10),
        "Neighbours._counts": Per("pod", 64 << 10),
        "Neighbours._selectors": Per("pod", 64 << 10),
    },
    "extender/state/headroom_gains.py": {"HeadroomGains._in": Per("node", 200)},
    "extender/state/object_cache.py": {
        "Namespaces._default_vram": Per("namespace", 500),
        "Namespaces._held": Per("namespace", 4_000),
        # In a console those of ``JournalFollower._streams``.
        "ObjectCache._pods_on": Per("pod", 200),
        "ObjectCache._uid_of": Per("pod", 500),
        "ObjectCache.cordoned": Per("node", 200),
        "ObjectCache.gpunodes": Per("reservation or device", 8_000),
        "ObjectCache.lowest_priorities": Per("node", 200),
        "ObjectCache.nodes": Per("node", 64 << 10),
        # etcd takes 1.5 MiB of JSON, of which small objects take ten times as much in memory.
        "ObjectCache.pods": Per("pod", 15 * MIB),
        "ObjectCache.uids_on": Per("reservation", 200),
        "ObjectCache.unbound": Per("pod", 200),
        "ObjectCache.with_max_sm": Per("pod", 200),
    },
    "extender/state/node_weigher.py": {"NodeWeigher._found": Per("replica of a device", 1_500)},
    "extender/state/weighing_queue.py": {
        "WeighingQueue._dirty": Per("node", 200),
        "WeighingQueue._failed": Per("node", 200),
        "WeighingQueue.unlisted": Fixed(1_000),
    },
    "extender/state/cluster_state.py": {"ClusterState._crowded": Per("node", 200)},
    "extender/state/cluster_writer.py": {"ClusterWriter._incomplete": Per("node", 200)},
    "extender/state/requeue_hints.py": {
        "RequeueHints._claim_checks": Fixed(256 * 4_000),
        "RequeueHints._waits": Per("pod", 4_000),
    },
    "extender/state/journal.py": {
        "Journal._by_uid": Fixed(64 * MIB),
        "Journal._preempted": Fixed(256 * 64_000),
        "Journal._schedulers": Fixed(64 * 500),
        "Journal._uid_of": Fixed(10_000 * 700),
        "NodeSets._last": Per("node", 4 * 200),
    },
    "extender/observability/journal_stream.py": {
        "Copy._sets": Per("node", 4 * 4 * 200),
        "Cursor._sets": Fixed(8 * 4 * 200),
        "Cursor._shown": Fixed(8 * 1_000 * 200),
    },
    # Used only by the demo and headroom serve --embedded.
    "extender/ledger/memory_store.py": {
        "EmbeddedStore._gpunodes": Per("node", 64 << 10),
        "EmbeddedStore._pods": Per("pod", 15 * MIB),
        "EmbeddedStore._shown": Per("pod", 500),
    },
    "extender/ledger/initialise.py": {"Initialiser._cleared": Per("pod", 200)},
    "extender/ledger/node_batcher.py": {
        "NodeQueue.queued": Per("bind under way", 2_000),
        "NodeBatcher._queues": Per("bind under way", 1_000),
    },
    "extender/ledger/node_capacity.py": {
        "NodeCapacity._arriving": Per("bind under way", 2_000),
    },
    "extender/placement/demand_pricing.py": {
        "DemandMix.demand": Fixed(64 * 500),
        "DemandTracker._offered": Fixed(256 * 100_000),
        "DemandTracker._seen": Fixed(4_096 * 1_000),
    },
    "extender/placement/snapshot_builder.py": {
        "Table._columns_shown": Per("device", 200),
        "Table._nodes": Per("node", 100),
        "Table._per_node_shown": Per("node", 100),
        "Table._resources": Per("resource", 500),
        "Table._row_of": Per("node", 2 * 200),
    },
    # An entry has some bytes for each device. The least recently used entry is evicted first.
    "extender/placement/fit_cache.py": {"FitCache._held": Per("device", 16 * 64)},
    "extender/state/decision_records.py": {"Records._records": Fixed(16 * MIB)},
    "extender/kube/interning.py": {
        "Interned._kept": Fixed(10 * MIB),
        "GPUNodeReader._specs": Per("node", 300),
    },
    "extender/kube/informers.py": {
        "KubernetesSources._reflectors": Fixed(10_000),
        "KubernetesSources._threads": Fixed(10_000),
    },
    "extender/controllers/sm_history.py": {
        "PrometheusHistory._held": Per("device", 600),
        "PrometheusHistory._abandoned": Fixed(3 * 1_000),
    },
    "extender/kube/reflector.py": {"Reflector._unreadable": Per("object", 700)},
    "extender/console/auth.py": {
        "_Answers._kept": Fixed(4_096 * 4_000),
        "_Answers._under_way": Fixed(64 * 4_000),
        "_Visible._namespaces": Fixed(32 * 500),
    },
    "extender/state/held_memory.py": {"HeldMemory._answers": Fixed(4_096 * 600)},
    "extender/state/holds.py": {
        # Each pod fits beside the holds before it.
        "Holds._assumed": Per("pod", 8_000),
        "Holds._binding": Per("pod", 2_000),
    },
    "extender/state/group_cycles.py": {
        "GroupCycles._cycles": Fixed(512 * 800),
        "_Cycle.asked": Per("pod", 150),
    },
    "extender/observability/feed.py": {
        "ChangeFeed._published": Fixed(10_000 * 500),
        "ChangeFeed._versions": Fixed(32 * 200),
        "Feed._followers": Fixed(32 * 1_024 * 300),
        "Feed._past": Fixed(4_096 * 4_000),
    },
    "extender/scheduler/retry_spreading.py": {
        "RetrySpreader._lately": Fixed(65_536 * 100),
        "RetrySpreader._together": Fixed(65_536 * 100),
        "RetrySpreader._tried": Fixed(65_536 * 300),
    },
    "extender/scheduler/candidate_nodes.py": {
        "CandidateNodes._fruitless": Fixed(16 * 2_000),
        "_Fruitless.nodes": Per("node", 16 * 64),
    },
    "extender/scheduler/group_binds.py": {
        "GroupBinds._attempts": Fixed(4_096 * 300),
        "GroupBinds._declined": Fixed(512 * 700),
        "_Attempt.unreserved": Fixed(0),  # with its pods, which are those of _attempts
    },
    "extender/scheduler/scheduling_state.py": {
        "SchedulingState._rejected_pods": Per("node", 64 * 10),
    },
    "extender/controllers/event_recorder.py": {"EventRecorder._recorded": Fixed(10_000 * 1_000)},
    "extender/controllers/eviction.py": {"EvictionController._recorded": Per("pod", 300)},
    "extender/controllers/overuse.py": {
        "OveruseController._logged": Fixed(4_096 * 200),
        "OveruseController._observed": Per("pod", 400),
        "OveruseController._seen": Fixed(2_048 * 600),
        "OveruseController._unresolved": Per("node", 200),
    },
    "extender/server/tls.py": {
        "Handshakes._open": Fixed(3 * 128 * (64 << 10)),  # three ports
        "Rejections._seen": Fixed(3 * 256 * 400),
    },
    "extender/state/event_queue.py": {
        "EventQueue._again": Per("object", 200),
        "EventQueue._own": Per("bind under way", 2_000),
        "EventQueue._watched": Per("object", 200),
        "EventQueue.reactions": Fixed(1_000),
    },
    "extender/periodic.py": {
        "Loops._progress_at_s": Fixed(64 * 200),
        "Loops._tasks": Fixed(64 * 2_000),
    },
    "extender/console/device_views.py": {"DeviceViews._views": Fixed(800 * 4_000)},
    "extender/console/shared_answers.py": {
        "SharedAnswers._answers": Fixed(8 * (1 << 20) + 8 * 64_000)
    },
    "extender/console/fleet.py": {
        "ModelSums._nodes": Per("node", 3_000),
        # One model for each node at most, and 10 numbers.
        "ModelSums._totals": Per("node", 600),
    },
    "extender/console/teams.py": {
        # The rows are those of ``GpuPods._nodes``.
        "TeamSums._nodes": Per("node", 200),
        "TeamSums.namespaces": Per("namespace", 700),
        "TeamSums.owners": Per("pod", 700),
    },
    "extender/state/gpu_pods.py": {"GpuPods._nodes": Per("pod", 600)},
    "extender/console/waiting.py": {"WaitingGroups.groups": Fixed(10 * 4_000)},
    "extender/console/process.py": {"ProcessMonitor._lags": Fixed(6_000 * 100)},
    "extender/app/cluster.py": {"Cluster.unlisted": Fixed(1_000)},
    "extender/observability/journal_follower.py": {
        "JournalFollower._addresses": Fixed(16 * 10_000),
        # Together with those of ``_streams``.
        "JournalFollower._ended": Fixed(0),
        "JournalFollower._own": Fixed(16 * 300),
        "JournalFollower._places": Fixed(16 * 300),
        # Records, pods as kube-scheduler showed them, and holds.
        "JournalFollower._streams": Fixed(4 * ((16 + 8) * MIB + 500 * (8_000 + 500))),
        "JournalFollower._unresolved": Fixed(16 * 500),
    },
    # History.forget drops blocks beyond MAX_BYTES; the totals of an hour.
    "extender/state/history.py": {
        "History._nodes": Fixed(120 * MIB),
        "History._totals": Fixed(360 * 200),
        "_NodeRows.blocks": Fixed(0),
        "_NodeRows.rows": Fixed(0),
    },
    "extender/state/holdings.py": {
        # Sums of 200 namespaces for each minute of an hour.
        "HeldMinutes._minutes": Fixed(60 * 201 * 350),
        "HeldSums._counts": Per("namespace", 150),
        "HeldSums._nodes": Per("pod", 350),
        "HeldSums._sums": Per("namespace", 350),
    },
    "extender/observability/gpu_user_reader.py": {
        "GpuUserReader._tries": Per("pod on a device", 300),
        "GpuUserReader._wanted": Per("pod on a device", 400),
    },
    "extender/observability/history_recorder.py": {
        "HistoryRecorder._seen": Per("node", 600),
        "HistoryRecorder.growing": Per("device", 500),
        "HistoryRecorder.held": Fixed(201 * 350),
    },
    "extender/observability/fleet_metrics.py": {"PendingPods._conditions": Per("pod", 2_000)},
    "extender/controllers/preemption.py": {
        "PreemptionController._not_before_s": Fixed(1_024 * 300),
        "PreemptionController._recorded": Fixed(1_024 * 2_000),
    },
    "extender/controllers/requeue.py": {"RequeueController._released": Per("pod", 200)},
    "extender/controllers/pending_events.py": {
        "PendingEventsController._explained": Per("pod", 500)
    },
    "extender/controllers/reconcile.py": {
        "ReconcileController._checks": Per("node", 4_000),
        "ReconcileController._unsettled": Per("node", 200),
    },
}
