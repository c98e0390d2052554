"""Run programs in the sandbox, as whoever starts this: JSON in on stdin, JSON out.

For tests of the sandbox as another user. It needs the standard library and the sandbox alone, so
that any Python that such a user can run will do.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from rollmill.rewards.sandbox.run import Limits, isolation_problem, run_tests


def main() -> None:
    request = json.load(sys.stdin)
    problem = isolation_problem()
    results = []
    if problem is None and request:
        limits = Limits(**request["limits"])
        results = run_tests(request["program"], request["tests"], limits)
    answer = {"problem": problem, "results": [dataclasses.asdict(one) for one in results]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
