"""Figures of a played run: what the server of the dashboard would tell, in its shapes and without randomness."""

import math
from typing import Any

BEGAN = 1_764_200_000.0
STEPS = 214
POINTS = 400


def _wave(at: int, period: float, size: float = 1.0) -> float:
    return size * math.sin(2 * math.pi * at / period)


def state(workers: int = 24) -> dict[str, Any]:
    """Return all sections of the state."""
    return {
        "run": {
            "name": "quickstart",
            "dir": "/runs/quickstart",
            "life": "living",
            "text": "the run is active",
            "ended": "",
            "notice": "",
            "read_only": False,
            "read_only_why": "",
            "reward": 0.871,
            "step": STEPS,
            "total_steps": 300,
            "steps_per_s": 1.24,
            "ran_s": 412.0,
            "left_s": 69.0,
            "silent_s": 0.0,
            "version": "0.1.0",
            "durability": "disk",
        },
        "queue": {
            "rollout_pressure": 1.12,
            "low": 0.5,
            "high": 2.0,
            "queued_sequences": 144,
            "batch_sequences": 128,
            "queued_groups": 18,
            "queued_bytes": 4_812_331,
            "leased_bytes": 2_118_004,
            "high_bytes": 268_435_456,
            "produced_per_s": 161.3,
            "consumed_per_s": 158.7,
            "staleness_max": 2,
            "staleness_bound": 4,
            "starved_s": 18.4,
        },
        "waits": {
            "why": "workers wait: stale_guard (3 of 24), until the trainer takes the next batch",
            "trainer": "",
            "workers": "stale_guard: 3 of 24 wait until the trainer takes the next batch",
            "seconds": [
                {"who": "workers", "reason": "stale_guard", "seconds": 96.2},
                {"who": "trainer", "reason": "too_few_groups", "seconds": 18.4},
                {"who": "workers", "reason": "no_credit", "seconds": 7.1},
            ],
        },
        "use": {
            "starved_of_run": 0.045,
            "starved": 0.012,
            "blocked": 0.118,
            "blocked_reason": "stale_guard",
            "blocked_by_env": {"sort3": 0.13, "add2": 0.09},
        },
        "environments": [
            _lane(
                "sort3", 0.812, 0.21, 16, "want 15.2: the trainer takes 158 sequences/s, a worker makes 10.4"
            ),
            _lane("add2", 0.604, 0.34, 8, "want 7.4: the trainer takes 80 sequences/s, a worker makes 10.9"),
            {**_lane("sort3", 0.79, 0.2, None, ""), "split": "eval"},
        ],
        "worker_counts": {"ready": workers - 2, "starting": 1, "draining": 1},
        "workers_version": 1,
        "engines": [
            {
                "name": "inference",
                "url": "http://127.0.0.1:8765",
                "pid": 4103,
                "in_hand": 37,
                "busy": 0.71,
                "draining": False,
                "trouble": "",
            },
            {
                "name": "inference-1",
                "url": "http://127.0.0.1:8766",
                "pid": 4190,
                "in_hand": 29,
                "busy": 0.64,
                "draining": False,
                "trouble": "",
            },
        ],
        "engine_target": {"target": 2, "current": 2, "pinned": None, "reason": "load 1.35 of 2"},
        "gpus": [_gpu(0, 93.0, False), _gpu(1, 88.0, False), _gpu(2, 0.0, True)],
        "gpu_absence": "",
        "trainers": [
            {
                "consumer": "trainer",
                "group": "main",
                "step": STEPS,
                "silent_s": 0.2,
                "connected": True,
                "has_left": False,
            }
        ],
        "trainer_trouble": "",
        "ledger": {
            "accepted": 3642,
            "queued": 18,
            "leased": 16,
            "trained": 64,
            "committed": 3310,
            "filtered": 221,
            "expired": 9,
            "dead": 4,
            "discarded": 0,
            "rewound": 0,
            "lost_before_accept": 0,
            "reasons": {"filtered(equal_scores)": 221, "expired(stale)": 9, "dead(deliveries)": 4},
        },
        "by_split": [
            {"split": "train", "groups": 3610, "sequences": 28880},
            {"split": "eval", "groups": 32, "sequences": 128},
        ],
        "findings": [
            {
                "env": "add2",
                "finding": "flat",
                "problem": "41 % of the groups have equal scores and teach nothing",
                "remedy": "choose harder tasks, or add a curriculum",
                "at": BEGAN + 300,
            }
        ],
        "decisions": [
            {
                "at": BEGAN + 396 - 23 * number,
                "env": "sort3" if number % 3 else "add2",
                "text": f"{14 + number % 3} -> {15 + number % 2} workers: want {14.2 + number % 4:.1f}",
            }
            for number in range(12)
        ],
        "hops": _hops(),
        "figures": {"loss": 0.0132, "kl": 0.0041, "entropy": 0.71, "grad_norm": 0.38, "clip_fraction": 0.012},
        "not_finite": [],
        "evaluation": {
            "points": 4,
            "last": {
                "step": 200,
                "mean": 0.78,
                "greedy": 0.84,
                "pass_1": 0.78,
                "pass_k": 0.91,
                "text": "greedy 0.84, sampled 0.78 ± 0.02, pass@4 0.91",
            },
            "left_out": "",
        },
        "curricula": [
            {"env": "sort3", "text": "levels: 812 drawn, 790 answered, success 0.62, level 2.4 of 5"}
        ],
        "host": {
            "host": "node-7",
            "cpus": 32,
            "cpu_percent": 61.0,
            "memory_used_bytes": 41_200_000_000,
            "memory_total_bytes": 137_400_000_000,
            "shm_free_bytes": 60_100_000_000,
            "disk_free_bytes": 812_000_000_000,
        },
        "processes": [
            {"name": name, "pid": 4000 + number, "cpu_percent": cpu, "rss_bytes": rss}
            for number, (name, cpu, rss) in enumerate(
                [
                    ("broker", 21.0, 212_000_000),
                    ("trainer", 98.0, 1_930_000_000),
                    ("inference", 94.0, 1_410_000_000),
                    ("orchestrator", 1.4, 91_000_000),
                    ("telemetry", 1.1, 74_000_000),
                ]
            )
        ],
        "network": [
            {"what": "listen", "text": "tcp://0.0.0.0:7760, keys in use: 1 of 7", "unwell": False},
            {
                "what": "key",
                "text": "worker-7, role worker from 10.0.0.7, heard now; refused: drain workers 2",
                "unwell": True,
            },
        ],
        "problems": [],
        "dead": {"count": 4},
        "settings": [
            {"key": "environment.sort3.weight", "now": 2.0, "configured": 1.0},
            {"key": "environment.add2.weight", "now": 1.0, "configured": 1.0},
            {"key": "broker.high_water_bytes", "now": 268435456, "configured": 268435456},
        ],
        "record": {"lines": 9120, "bytes": 1_900_000, "damaged_lines": 0, "loaded": 1.0, "problem": ""},
    }


def _lane(env: str, mean: float, deviation: float, target: int | None, reason: str) -> dict[str, Any]:
    return {
        "env": env,
        "split": "train",
        "weight": 1.0,
        "min_share": 0.0,
        "max_staleness": 4,
        "producers": target or 0,
        "queued_groups": 9,
        "queued_sequences": 72,
        "leased_groups": 8,
        "granted": 12,
        "accepted_groups": 1810,
        "trained_groups": 1702,
        "accepted_per_s": 10.1,
        "oldest_age_s": 0.8,
        "held_bytes": 3_400_000,
        "high_bytes": 0,
        "wait": "stale_guard",
        "waiting": 3,
        "rollout_s": 1.34,
        "reward_mean": mean,
        "reward_deviation": deviation,
        "reward_groups": 1810,
        "target": target,
        "current": target,
        "pinned": None,
        "target_reason": reason,
        "limit": "",
        "given_up": "",
    }


def _gpu(index: int, busy: float, cordoned: bool) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{index:08x}-1111-2222-3333-444455556666",
        "name": "NVIDIA H100 80GB HBM3",
        "host": "node-7",
        "index": index,
        "state": "ok",
        "why": "",
        "utilisation_percent": busy,
        "memory_used_bytes": 51_200_000_000 if not cordoned else 600_000_000,
        "memory_total_bytes": 85_500_000_000,
        "temperature_c": 61.0 + index,
        "cordoned": cordoned,
        "causes": ["heat"] if cordoned else [],
        "reason": "92 °C, 3 °C below the limit" if cordoned else "",
        "holders": [] if cordoned else ["inference" if index == 0 else "trainer"],
        "draining": False,
    }


def _hop(hop: str, env: str, median: float, **more: Any) -> dict[str, Any]:
    return {
        "hop": hop,
        "env": env,
        "split": "train",
        "engine": "",
        "route": "",
        "status": "",
        "name": None,
        "count": 1810,
        "per_s": 10.1,
        "tokens_per_s": 5200.0,
        "p50_s": median,
        "p95_s": median * 2.1,
        "p99_s": median * 3.4,
        "p999_s": median * 5.2,
        "mean_s": median * 1.1,
        "recent_count": 90,
        "recent_p50_s": median * 0.5,
        "recent_p95_s": median * 0.9,
        "recent_p99_s": median * 1.2,
        "recent_p999_s": median * 1.3,
        "slowest_s": median * 7.5,
        "slowest_id": f"{env}-0f3a9c",
        "clock_error_s": 0.0,
        **more,
    }


def _hops() -> list[dict[str, Any]]:
    way = {"rollout": 1.12, "send": 0.0031, "queue": 0.84, "train": 0.62, "commit": 1.9}
    rows = [
        _hop(hop, env, median * scale)
        for env, scale in (("sort3", 1.0), ("add2", 0.6))
        for hop, median in way.items()
    ]
    calls = [
        _hop("call", "", 0.041, engine="inference", status="2xx", per_s=322.0),
        _hop("call", "", 0.046, engine="inference-1", status="2xx", per_s=291.0),
        _hop("call", "", 2.01, engine="inference-1", status="5xx", per_s=0.02),
        _hop("http", "", 0.0012, route="POST /v1/completions", status="2xx", per_s=613.0),
        _hop("http", "", 0.0004, route="GET /v1/models", status="4xx", per_s=0.1),
    ]
    return [*rows, *calls]


def part_latencies(by: str, workers: int) -> list[dict[str, Any]]:
    """Return latencies by worker, host, engine or GPU, the slowest first."""
    names = {
        "worker": [f"sort3-{number}" for number in range(workers)],
        "host": ["node-7", "node-8"],
        "engine": ["inference", "inference-1"],
        "gpu": ["GPU-00000000-1111-2222-3333-444455556666"],
    }[by]
    hop, status = ("call", "2xx") if by == "engine" else ("rollout", "")
    return [
        {**_hop(hop, "", 1.12 * (2 - number / len(names))), "name": name, "status": status}
        for number, name in enumerate(names)
    ]


def _table(name: str, key: str, **columns: list[float | None]) -> dict[str, Any]:
    return {"name": name, "key": key, "width_s": 1.0, "from": 0, "columns": columns}


def history(points: int = POINTS) -> list[dict[str, Any]]:
    """Return all series, of `points` rows each."""
    at = range(points)
    t: list[float | None] = [BEGAN + number for number in at]
    pressure = [max(0.0, 1.1 + _wave(number, 90, 0.4) + _wave(number, 17, 0.2)) for number in at]
    ready = [float(min(22, 4 + number // 12)) for number in at]
    reward = [1 - math.exp(-number / 160) + _wave(number, 11, 0.025) for number in at]
    series = [
        _table(
            "queue",
            "",
            t=t,
            rollout_pressure=[*pressure],
            queued_sequences=[128 * one for one in pressure],
            ready=[*ready],
            workers=[one + 2 for one in ready],
            produced_per_s=[min(165.0, 40 + number * 0.9) + _wave(number, 23, 9) for number in at],
            consumed_per_s=[min(160.0, 25 + number * 0.9) + _wave(number, 31, 6) for number in at],
            trainer_wait=[0.05 for _ in at],
            blocked=[0.1 for _ in at],
        ),
        _table(
            "steps",
            "",
            t=t,
            step=[float(number // 2) for number in at],
            reward=[*reward],
            staleness_max=[float((number * 7) % 3) for number in at],
            staleness_mean=[0.6 + _wave(number, 40, 0.3) for number in at],
            tokens=[5000.0 for _ in at],
            tokens_per_s=[5100.0 for _ in at],
            loss=[0.09 * math.exp(-number / 120) + 0.012 + _wave(number, 9, 0.004) for number in at],
        ),
        _table(
            "evaluation",
            "",
            t=[BEGAN + 10 + 95 * number for number in range(5)],
            step=[50.0 * number for number in range(5)],
            mean=[0.12, 0.41, 0.6, 0.72, 0.78],
            greedy=[0.1, 0.46, 0.66, 0.79, 0.84],
            pass_1=[0.12, 0.41, 0.6, 0.72, 0.78],
            pass_k=[0.3, 0.6, 0.8, 0.88, 0.91],
        ),
        _table("wait", "trainer:too_few_groups", t=t, share=[0.35 * math.exp(-number / 60) for number in at]),
        _table("wait", "workers:stale_guard", t=t, share=[0.15 + _wave(number, 70, 0.1) for number in at]),
    ]
    for env, low in (("sort3", 0.0), ("add2", 0.2)):
        mean: list[float | None] = [
            (1 - low) * (1 - math.exp(-number / 170)) + _wave(number, 13, 0.03) for number in at
        ]
        series.append(_table("reward", env, t=t, step=[*t], mean=mean, low=mean, high=mean))
        series += [
            _table(
                "hop", f"{hop}:{env}", t=t, p50_s=[median + _wave(number, 50, median / 6) for number in at]
            )
            for hop, median in (
                ("rollout", 1.12),
                ("queue", 0.84),
                ("train", 0.62),
                ("send", 0.003),
                ("commit", 1.9),
            )
        ]
    series.append(_table("target", "sort3", t=t, target=[one + 1 for one in ready], current=[*ready]))
    series += [
        _table(
            "gpu",
            f"GPU-{index:08x}-1111-2222-3333-444455556666",
            t=t,
            utilisation_percent=[85 + _wave(number + 9 * index, 37, 8) for number in at],
        )
        for index in range(2)
    ]
    return series


def workers(count: int) -> list[dict[str, Any]]:
    """Return so many workers; every 97th is unwell."""
    return [_worker(number, number % 97 == 5) for number in range(count)]


def _worker(number: int, unwell: bool) -> dict[str, Any]:
    return {
        "worker": f"{'sort3' if number % 3 else 'add2'}-{number}",
        "env": "sort3" if number % 3 else "add2",
        "state": "waiting" if unwell else "starting" if number % 61 == 7 else "ready",
        "unwell": unwell,
        "trouble": "waits for its next start: exit code 1, ZeroDivisionError: division by zero"
        if unwell
        else "",
        "pid": 5000 + number,
        "age_s": 400.0 - number % 50,
        "in_hand": number % 4,
        "produced": 150 + (number * 37) % 90,
        "abandoned": number % 7 == 0,
        "blocked_s": (number * 13 % 40) / 10,
        "silent_s": 0.1 + (number % 9) / 10,
        "crashes": int(unwell),
        "restarts": int(unwell),
        "next_start_s": 12.0 if unwell else None,
        "reason": "exit code 1" if unwell else "",
        "ends_s": None,
        "last_lines": ["Traceback (most recent call last):", "ZeroDivisionError: division by zero"]
        if unwell
        else [],
    }


def dead_letters() -> list[dict[str, Any]]:
    """Return dead letters, newest first."""
    return [
        {
            "group_id": f"sort3-{number:08x}",
            "order": number,
            "env": "sort3",
            "producer": f"sort3-{number}",
            "reason": "3 deliveries failed, the last: the step raised ValueError",
            "at": BEGAN + 380 - 30 * number,
            "deliveries": 3,
            "failures": 3,
            "sequences": 4,
            "tokens": 92,
            "bytes": 2148,
            "kept": True,
            "damaged": "",
        }
        for number in range(4)
    ]


def dead_group(group_id: str) -> dict[str, Any]:
    """Return the contents of a dead letter."""
    return {
        **dead_letters()[0],
        "group_id": group_id,
        "split": "train",
        "history": ["12:03:11 accepted", "12:03:12 leased to trainer", "12:03:19 failed: ValueError"],
        "problem": "",
        "tokenizer": "the run's tokenizer",
        "sequences_total": 6,
        "offset": 0,
        "sequences": [
            {
                "index": number,
                "score": number / 4,
                "advantage": number / 4 - 0.375,
                "tokens_total": 23,
                "cut": False,
                "pieces": [
                    {"text": "Sort the digits 7 1 4: ", "trained": False, "tokens": 12, "ids": []},
                    {
                        "text": "1 4 7" if number % 2 else "1 7 4",
                        "trained": True,
                        "tokens": 6,
                        "ids": [],
                        "logprob_mean": -0.41,
                        "advantage_mean": number / 4 - 0.375,
                    },
                    {"text": "\n[tool] checked\n", "trained": False, "tokens": 5, "ids": []},
                ],
            }
            for number in range(6)
        ],
        "columns": [{"name": "ratings", "kind": "f32 [6]", "preview": "0.0 0.25 0.5 0.75 1.0 1.25"}],
    }
