"""Collections that live for one call, one round or one command, so they do not grow."""

#: Temporary collections of one call or request. Their size is limited by the request
#: (``extender.console.problem_details``, ``extender.server.http_limits``) or by one snapshot.
PASSING = {
    # Requests that wait for their turn, at most one for each of 512 connections.
    "extender/server/turns.py": ["Turns._waiting"],
    "extender/state/node_settings.py": ["NodeSettings.cordoned"],
    # One set, shared by all nodes.
    "extender/placement/snapshot.py": ["NodeTerms.by_dra"],
    "extender/state/dump.py": ["Settled.dra_resources", "Settled.exempt"],
    "extender/admission/json_patch.py": ["Draft.operations"],
    "extender/state/changes.py": ["Effects.events", "Effects.outcomes", "Effects.unsettled"],
    "extender/state/evictable_pods.py": ["Needs._terms"],
    "extender/state/victim_search.py": [
        *("Offer.pods", "_Search.needed_bytes", "_Candidate._evictable", "_Candidate._kept"),
        *("_Candidate._named", "_Candidate._proposed"),
    ],
    "extender/state/pod_requests.py": ["QuotaUse._quotas", "QuotaUse._taken"],
    "extender/state/redaction.py": ["Redaction._names"],
    "extender/doctor/environment.py": ["Environment.schedulers"],
    "extender/doctor/waiting_pods.py": ["WaitingPods._groups", "WaitingPods._resources"],
    "extender/state/simulation.py": [
        *("Simulation._beside", "Simulation._changed", "Simulation._held"),
        *("_SimulatedNode.confirmed", "_SimulatedNode.gone"),
    ],
    "extender/state/pending_pods.py": [
        *("Explaining._eligible", "Explaining._everywhere", "Explaining._explanations"),
        *("Pending.oldest", "Pending.pods"),
    ],
    "extender/state/requeue_hints.py": [
        *("_Checks._eligible", "_Checks._fits", "_Checks._names", "_Checks._rows"),
        "_Checks.claim_checks",
    ],
    "extender/config/loading.py": ["_Environment._env"],
    # One route for each verb and prefix.
    "extender/scheduler/server.py": ["VerbsApp.endpoints"],
    "extender/ledger/initialise.py": ["ErrorsByNode._errors"],
    "extender/ledger/store.py": ["Binding.annotations"],
    "extender/placement/fit.py": ["Verdicts.closed"],
    "extender/placement/overuse_eviction.py": ["OveruseEvictions.warned"],
    "extender/placement/overfull_devices.py": [
        "Idle.placed_on",
        "Misplaced.leave",
        "Misplaced.stuck",
    ],
    "extender/placement/prediction_outcome.py": ["_Replay._arrived"],
    "extender/placement/occupants.py": ["EnvironmentPods._on", "EnvironmentPods.uids"],
    "extender/placement/occupancy.py": [
        *("_UnconfirmedPods._holders", "_UnconfirmedPods._renamed", "_UnconfirmedPods._waiting"),
        *("_UnconfirmedPods.picks", "_UnconfirmedPods.reserved"),
    ],
    "extender/placement/report_index.py": [
        *("ReportIndex._replicas", "ReportIndex._resources", "ReportIndex._rows"),
    ],
    "extender/placement/score.py": ["Ranking.terms"],
    "extender/placement/victims.py": ["_Search._results"],
    "extender/prometheus.py": ["_Envelope.warnings"],
    "extender/controllers/sm_history.py": ["Answer.ratios", "Answer.ages_s"],
    "extender/state/defrag.py": ["Advice.stay", "_Candidate.movable", "_Candidate.stay"],
    "extender/state/movable_pods.py": ["Movers._eligible", "Movers._fitting"],
    "extender/console/defrag.py": ["_Quotas._exceeded", "_Quotas.not_checked"],
    "extender/console/fleet_map.py": ["_Names.numbers"],
    "extender/state/request_whatif.py": ["_Copy._eligible"],
    "extender/console/whatif.py": ["_Changes.added", "_Changes.moving", "_Changes.released"],
    "extender/scheduler/extender_v1.py": [
        *("FilterResult.failed_nodes", "FilterResult.failed_and_unresolvable_nodes"),
        "PreemptResult.node_name_to_meta_victims",
    ],
    "extender/config/reload.py": ["Origin.env", "Origin.flags"],
}
