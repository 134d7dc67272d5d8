"""Sessions of pytest with the plugin: what becomes a test, what a failure says, what is known."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import pytest

import support

ENGINE = f"{sys.executable} {support.ROOT / 'docs/examples/paged_engine.py'}"
FINDING = "vllm_0_22_1_two_half_loaded.jsonl"  # a recording of vLLM with a finding
SOUND = support.SAMPLES / "recordings/vllm-0.33.0/mla/0014.jsonl"
PLUGINS = support.BUILD / "plugins"


@pytest.fixture
def session(pytester: pytest.Pytester):
    """Runs pytest with these options in a folder of its own, cases in `cases`."""
    (pytester.path / "cases").mkdir()

    def run(*options: str) -> pytest.RunResult:
        return pytester.runpytest("-p", "lockstep_pytest.plugin", "-rxs", *options)

    return run


def put(pytester: pytest.Pytester, *paths) -> None:
    for path in paths:
        shutil.copy(path, pytester.path / "cases" / path.name)


def put_mutant(pytester: pytest.Pytester) -> None:
    """A saved case with a planted defect, which therefore fails."""
    support.run(support.LOCKSTEP, "replay", support.SAMPLES / "shared_prefixes.jsonl", "--backend",
                "simt", "--mutant", "drop-slot", "--limit", "4", "--save", pytester.path / "cases",
                expect=1)  # fmt: skip


def test_each_file_of_the_folder_is_a_test_by_what_it_holds(session, pytester) -> None:
    put(pytester, SOUND, support.SAMPLES / "recordings/vllm-0.22.1/layouts.jsonl")
    trace = (support.SAMPLES / "shared_prefixes.jsonl").read_text().splitlines()
    (pytester.path / "cases/short.jsonl").write_text(
        "\n".join([*trace[:4], '{"end":true,"records":3}', ""])
    )
    result = session("--lockstep-cases", "cases", "-v")
    result.assert_outcomes(passed=3)
    assert not (pytester.path / ".lockstep").exists()
    result.stdout.fnmatch_lines_random(["*recording[[]0014.jsonl] PASSED*",
                                        "*layouts[[]layouts.jsonl] PASSED*",
                                        "*trace[[]short.jsonl] PASSED*"])  # fmt: skip


def test_the_order_of_keys_and_gzip_do_not_hide_a_file(session, pytester) -> None:
    head, _, steps = (support.REGRESSIONS / FINDING).read_text().partition("\n")
    text = f"{json.dumps(json.loads(head), sort_keys=True)}\n{steps}"
    (pytester.path / "cases/sorted.jsonl").write_text(text)
    (pytester.path / "cases/packed.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    result = session("--lockstep-cases", "cases", "-v")
    result.assert_outcomes(failed=1, xfailed=1)  # one finding
    result.stdout.fnmatch_lines_random(["*recording[[]sorted.jsonl] *",
                                        "*recording[[]packed.jsonl.gz] *"])  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b"<<<<<<< HEAD\n", "the first line of no known format"),
        (b"\xef\xbb\xbf" + SOUND.read_bytes(), "a byte-order mark"),
        (b'{"layout_recording":1}\n', "expected"),
    ],
)
def test_a_file_that_cannot_be_read_fails(session, pytester, content, says) -> None:
    (pytester.path / "cases/odd.jsonl").write_bytes(content)
    result = session("--lockstep-cases", "cases")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"lockstep: *odd.jsonl*{says}*"])


def test_a_link_to_no_file_fails_and_a_folder_is_not_a_test(session, pytester) -> None:
    put(pytester, SOUND)
    (pytester.path / "cases/folder.jsonl").mkdir()
    (pytester.path / "cases/dead.jsonl").symlink_to("nowhere.jsonl")
    result = session("--lockstep-cases", "cases")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["lockstep: *cases/dead.jsonl*"])


def test_plans_that_differ_from_the_models_fail(session, pytester) -> None:
    text = (support.SAMPLES / "recordings/vllm-0.22.1/layouts.jsonl").read_text()
    (pytester.path / "cases/plans.jsonl").write_text(
        text.replace('"aligned":{"block_size":1056', '"aligned":{"block_size":528')
    )
    result = session("--lockstep-cases", "cases")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["conform line 1: aligned.block_size is 528, the model's 1056"])


def test_a_case_that_fails_says_its_line_the_smallest_case_and_one_command(
    session, pytester
) -> None:
    put_mutant(pytester)
    result = session("--lockstep-cases", "cases")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "page_written step 0 request r0: page 1 of tensor 0 differs *",
            "The smallest case, .lockstep/shared_prefixes-step*.min.case.jsonl:",
            "  1 requests, 2 tokens, 1 groups, 1 layers, 2 blocks,*",
            "What happens in it: .lockstep/shared_prefixes-step*.min.explain.txt",
            "Again: lockstep explain .lockstep/shared_prefixes-step*.min.case.jsonl",
            "lockstep: 1 case decided by the model, judged by pages on simt, audit and "
            "invariants; 1 failure",
        ]
    )
    result.stdout.fnmatch_lines(["planted: drop-slot"])
    (text,) = (pytester.path / ".lockstep").glob("*.explain.txt")
    assert text.read_text().startswith("$ lockstep explain .lockstep/shared_prefixes-step")
    assert "Here it fails: page_written" in text.read_text()
    again = next(line for line in result.outlines if line.startswith("Again: lockstep "))
    words = again.removeprefix("Again: lockstep ").split()
    said = support.run(support.LOCKSTEP, *words, expect=1, cwd=pytester.path)
    assert "Here it fails: page_written" in said.stdout


def test_a_finding_of_a_recording_is_the_audits_own_line(session, pytester) -> None:
    put(pytester, support.REGRESSIONS / FINDING)
    result = session("--lockstep-cases", "cases")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["audit.* step *", f"Again: lockstep audit *cases/{FINDING}"])


def known_file(pytester: pytest.Pytester, **entry: object) -> str:
    (pytester.path / "known.json").write_text(
        json.dumps({"lockstep_known": 1, "known": [{"id": "ENG-42"} | entry]})
    )
    return "--lockstep-known=known.json"


def check_of_finding() -> str:
    said = support.run(support.LOCKSTEP, "audit", support.REGRESSIONS / FINDING, expect=1)
    return next(line for line in said.stdout.splitlines() if line.startswith("audit.")).split()[0]


def test_a_known_finding_is_expected_by_its_id(session, pytester) -> None:
    put(pytester, support.REGRESSIONS / FINDING)
    known = known_file(pytester, check=check_of_finding(), test=f"recording[{FINDING}]")
    result = session("--lockstep-cases", "cases", known)
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["*ENG-42: audit.*"])


@pytest.mark.parametrize(
    ("entry", "is_read"),
    [
        ({"check": "b", "text": "c", "until": "2096-02-29", "x_owner": "me", "test": "d"}, True),
        ({"check": "b", "until": "2097-02-29"}, False),
        ({"check": "b", "until": "29.02.2096"}, False),
        ({"check": "b", "until": "20960229"}, False),
        ({"check": "b", "text": ""}, False),
        ({"check": "b", "id": ""}, False),
        ({"check": "b", "id": 7}, False),
        ({"check": "b", "where": "c"}, False),
        ({}, False),
    ],
)
def test_fuzz_and_pytest_read_the_same_files_of_known_failures(session, pytester, entry, is_read):
    known = known_file(pytester, **entry)
    assert (session(known).ret == pytest.ExitCode.NO_TESTS_COLLECTED) == is_read
    support.run(support.LOCKSTEP, "fuzz", "--seed", "1", "--backend", "none", "--known",
                pytester.path / "known.json", expect=0 if is_read else 2)  # fmt: skip


def test_a_known_finding_that_is_gone_fails_until_it_is_taken_out(session, pytester) -> None:
    put(pytester, SOUND)
    known = known_file(pytester, check="audit.handed_out", test="recording[*]")
    result = session("--lockstep-cases", "cases", known)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*ENG-42*", "lockstep: *; 1 failure"])


@pytest.mark.parametrize(
    "entry",
    [
        {"check": "audit.cache_events"},
        {"check": "audit.cache_events", "test": "recording[*]"},
        {"check": "the finding's", "text": "of quite another sentence"},
        {"check": "the finding's", "until": "2001-01-01"},
    ],
)
def test_a_failure_that_is_not_the_known_one_is_news(session, pytester, entry) -> None:
    put(pytester, support.REGRESSIONS / FINDING)
    entry["check"] = entry["check"].replace("the finding's", check_of_finding())
    result = session("--lockstep-cases", "cases", known_file(pytester, **entry))
    result.assert_outcomes(failed=1)


def test_each_seed_is_a_test(session) -> None:
    result = session("--lockstep-seeds", "7:11", "--lockstep-backend", "none", "-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*seed[[]10] PASSED*"])


def test_a_seed_that_the_engine_refuses_is_skipped_alone_too(session) -> None:
    for seeds, passed, skipped in (("1:5", 2, 2), ("3", 0, 1)):
        result = session("--lockstep-seeds", seeds, "--lockstep-decisions", ENGINE)
        result.assert_outcomes(passed=passed, skipped=skipped)
        result.stdout.fnmatch_lines(["SKIPPED *: refused: paged-N.N: found several groups"])
        judged = f"lockstep: {passed} seeds decided by * 0 failures" if passed else "*1 skipped*"
        result.stdout.fnmatch_lines([judged])


def test_a_refused_option_is_named(session) -> None:
    result = session("--lockstep-seeds", "1", "--lockstep-backend", "nope")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["lockstep: --backend: nope: expected *"])


def test_a_defect_of_a_scheduler_is_found_by_a_seed_and_made_small(session, pytester) -> None:
    result = session("--lockstep-seeds", "1:13", "--lockstep-decisions", ENGINE + " --bug lost")
    outcomes = result.parseoutcomes()
    # One bug is one failure; the other seeds that show it are counted.
    assert outcomes["failed"] == 1 and outcomes["xfailed"] >= 2 and sum(outcomes.values()) == 12
    tests = outcomes["xfailed"] + 1
    result.stdout.fnmatch_lines(
        [
            f"*{tests} tests fail this way; also*",
            f"lockstep: {12 - outcomes['skipped']} seeds decided by {ENGINE} --bug lost, judged by "
            f"the audit; 1 failure in {tests} tests",
        ]
    )
    shrunk = list((pytester.path / ".lockstep").glob("*.min.case.jsonl"))
    assert 1 <= len(shrunk) < tests
    assert len(list((pytester.path / ".lockstep").glob("*.explain.txt"))) == len(shrunk)
    result.stdout.fnmatch_lines(
        [
            "audit.conservation step *",
            "*.lockstep/seed-*.min.case.jsonl *",
            "Again: lockstep explain .lockstep/seed-*.min.case.jsonl --decisions *",
        ]
    )


def test_one_error_of_the_set_up_is_one_failure(session) -> None:
    result = session("--lockstep-seeds", "0:10", "--lockstep-decisions", "/nowhere/engine")
    result.assert_outcomes(failed=1, skipped=9)
    result.stdout.fnmatch_lines(["lockstep: *engine*", "*10 tests fail this way; also*",
                                 "lockstep: 1 failure in 10 tests"])  # fmt: skip


def test_a_planted_defect_of_the_engine_is_named(session) -> None:
    engine = ENGINE + " --bug lost #--plant=lost-block"
    result = session("--lockstep-seeds", "1:13", "--lockstep-decisions", engine)
    result.stdout.fnmatch_lines(["planted: lost-block"])


def test_selection_by_name_runs_what_is_left(session) -> None:
    result = session("--lockstep-seeds", "0:9", "--lockstep-backend", "none", "-k", "5 or 8")
    result.assert_outcomes(passed=2, deselected=7)


@pytest.mark.skipif(
    not (PLUGINS / "plain_plugin_bug.so").is_file(), reason="tests/plugins are not built"
)
def test_each_layout_is_a_test_of_kernels_and_a_defect_is_found(session) -> None:
    sound = session("--lockstep-layouts", "0:8", f"--lockstep-backend={PLUGINS}/plain_plugin.so")
    assert sound.ret == 0
    assert sound.parseoutcomes()["passed"] >= 5
    broken = session(
        "--lockstep-layouts", "0:8", f"--lockstep-backend={PLUGINS}/plain_plugin_bug.so"
    )
    assert broken.parseoutcomes()["failed"] >= 1
    broken.stdout.fnmatch_lines(["slot_mapping step *", "Again: lockstep explain .lockstep/*"])


def test_a_backend_that_cannot_be_loaded_is_one_failure(session, pytester) -> None:
    pytester.path.joinpath("text.so").write_text("no library")
    for backend in ("nowhere.so", "text.so"):
        for tests in ("--lockstep-layouts", "--lockstep-seeds"):
            result = session(tests, "0:2", f"--lockstep-backend=./{backend}")
            result.assert_outcomes(failed=1, skipped=1)


@pytest.mark.skipif(
    not (PLUGINS / "plain_plugin.so").is_file(), reason="tests/plugins are not built"
)
def test_a_seed_that_runs_without_the_backend_is_not_judged_by_its_pages(session) -> None:
    result = session("--lockstep-seeds", "103:105", f"--lockstep-backend={PLUGINS}/plain_plugin.so")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["lockstep: 1 seed decided by the model, judged by audit and invariants; 1 seed decided by "
         "the model, judged by pages on *plain_plugin.so, audit and invariants; 0 failures"]
    )  # fmt: skip


def test_the_ini_file_says_it_as_well(session, pytester) -> None:
    pytester.makeini("[pytest]\nlockstep_seeds = 3:5\nlockstep_backend = none\n")
    session().assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--lockstep-seeds", "some"), "*--lockstep-seeds some: expected A:B*"),
        (("--lockstep-cases", "nowhere"), "*there is no folder nowhere*"),
        (("--lockstep-known", "nowhere.json"), "*nowhere.json: not a file of known failures*"),
        (("--lockstep-save", "/proc/nowhere"), "*--lockstep-save /proc/nowhere: No such file*"),
    ],
)
def test_what_is_no_option_is_refused(session, options, says) -> None:
    result = session(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([says])


def test_what_the_command_refuses_is_one_sentence(session, pytester) -> None:
    (pytester.path / "cases/broken.jsonl").write_text('{"schedule_recording":1}\n')
    result = session("--lockstep-cases", "cases")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["lockstep: *broken.jsonl:1: *"])
    result.stdout.no_fnmatch_line("*Traceback*")


# The fixture, with a vllm that only looks like it: a pool and a queue.

STAND_IN = '''
import fakes

class Scheduler(fakes.Scheduler):
    """Gives every new request a block; with `bug`, always block 1."""
    bug = False

    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self.blocks, self.new = iter(range(1, 9)), []

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.new.append(request)

    def schedule(self):
        rows = {}
        for request in self.new:
            block = 1 if self.bug else next(self.blocks)
            rows[request.request_id] = (0, ([block],))
            self.tables[request.request_id] = ([block],)
            self.running.append(request)
        taken = {block for row in self.tables.values() for block in row[0]}
        self.kv_cache_manager.block_pool.free = 8 - len(taken)
        self.new = []
        return fakes.output({name: 3 for name in rows}, new=rows)

    def update_from_output(self, output, model_output):
        return fakes.engine_outputs({})

    def shutdown(self):
        pass
'''

DRIVES = """
import fakes
from vllm.v1.core.sched.scheduler import Scheduler

class Mine(Scheduler):
    bug = {bug}

def drive(cls):
    scheduler = cls(fakes.config())
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        scheduler.add_request(fakes.request(name, prompt_token_ids=prompt))
    output = scheduler.schedule()
    scheduler.update_from_output(output, fakes.model_output({{"a": [7], "b": [8]}}))

def test_drives(lockstep_audit):
    drive(Mine)
    assert lockstep_audit.num_schedulers == 1

def test_plain():
    drive(Mine)
"""


@pytest.fixture
def stand_in(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    package = pytester.path / "stand_in"
    inner = package / "vllm" / "v1" / "core" / "sched"
    inner.mkdir(parents=True)
    for folder in (inner, *list(inner.parents)[:3]):
        (folder / "__init__.py").write_text("")
    (package / "vllm" / "__init__.py").write_text('__version__ = "0.33.0"\n')
    (inner / "scheduler.py").write_text(STAND_IN)
    (inner / "async_scheduler.py").write_text(
        "from vllm.v1.core.sched.scheduler import Scheduler\nclass AsyncScheduler(Scheduler): ...\n"
    )
    monkeypatch.syspath_prepend(str(package))

    def run(bug: bool, *options: str) -> pytest.RunResult:
        pytester.makepyfile(DRIVES.format(bug=bug))
        # In a process of its own: modules named vllm stay loaded.
        return pytester.runpytest_subprocess("-p", "lockstep_pytest.plugin", *options)

    monkeypatch.setenv("PYTHONPATH", str(package), prepend=":")
    return run


def test_the_fixture_passes_a_sound_scheduler(stand_in, pytester) -> None:
    result = stand_in(False)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["lockstep: 1 scheduler decided by vllm 0.33.0, judged by the audit; 0 failures"]
    )
    assert not (pytester.path / ".lockstep").exists()


def test_the_fixture_fails_a_test_whose_scheduler_gives_a_block_twice(stand_in) -> None:
    result = stand_in(True)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["audit.* step 0 request *block 1*"])


def test_the_evidence_of_the_fixture_stays_and_again_repeats_it(stand_in, pytester) -> None:
    for _ in range(2):  # a second run replaces the first one's
        result = stand_in(True)
        kept = [path.relative_to(pytester.path) for path in pytester.path.rglob(".lockstep/*/*")]
        assert {path.name for path in kept} >= {"scheduler0-step0.jsonl"}
        again = next(line for line in result.outlines if line.startswith("Again: lockstep "))
        words = again.removeprefix("Again: lockstep ").split()
        assert words[0] == "audit" and Path(words[1]) in kept
        said = support.run(support.LOCKSTEP, *words, expect=1, cwd=pytester.path)
        assert "audit." in said.stdout
        assert any(path.name.endswith(".explain.txt") for path in kept), kept


def test_a_test_that_changes_its_folder_keeps_its_evidence_where_it_was_started(
    stand_in, pytester
) -> None:
    stand_in(True)
    test = next(pytester.path.glob("test_*.py"))
    test.write_text(test.read_text().replace(
        "def test_drives(lockstep_audit):\n",
        "def test_drives(lockstep_audit, tmp_path, monkeypatch):\n"
        "    monkeypatch.chdir(tmp_path)\n",
    ))  # fmt: skip
    shutil.rmtree(pytester.path / ".lockstep")
    result = pytester.runpytest_subprocess("-p", "lockstep_pytest.plugin")
    result.assert_outcomes(passed=1, failed=1)
    assert list(pytester.path.glob(".lockstep/*/scheduler0-step0.jsonl"))


def test_a_test_that_fails_by_itself_keeps_its_recording(stand_in, pytester) -> None:
    stand_in(False)
    test = next(pytester.path.glob("test_*.py"))
    test.write_text(test.read_text().replace("num_schedulers == 1", "num_schedulers == 2"))
    result = pytester.runpytest_subprocess("-p", "lockstep_pytest.plugin")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["lockstep audit .lockstep/*/scheduler0.jsonl"])
    assert list(pytester.path.glob(".lockstep/*/scheduler0.jsonl"))


def test_a_scheduler_that_never_ends_fails_its_test_with_liveness(stand_in, pytester) -> None:
    stand_in(False)
    test = next(pytester.path.glob("test_*.py"))
    test.write_text(test.read_text().replace(
        "    output = scheduler.schedule()\n",
        "    output = scheduler.schedule()\n"
        "    while cls.never_ends:\n        scheduler.schedule()\n",
    ).replace("bug = False", "bug = False\n    never_ends = True", 1).replace(
        "def test_plain():\n", "def test_plain():\n    Mine.never_ends = False\n"))  # fmt: skip
    result = pytester.runpytest_subprocess("-p", "lockstep_pytest.plugin", timeout=120)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["liveness: requests wait forever: in 1024 steps none of a, b *"])
    result.stdout.fnmatch_lines(["Again: lockstep audit .lockstep/*/scheduler0.jsonl"])
    assert list(pytester.path.glob(".lockstep/*/scheduler0.jsonl"))


def test_every_test_is_watched_where_that_is_asked_for(stand_in) -> None:
    stand_in(True, "--lockstep-record").assert_outcomes(failed=1, xfailed=1)


def test_a_test_that_makes_no_scheduler_audits_nothing_and_fails(session, pytester) -> None:
    pytester.makepyfile("def test_idle(lockstep_audit): ...")
    result = session()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*made no scheduler of vLLM: nothing was audited*"])


# A user's kernels.


def test_kernels_of_a_class_are_checked_and_a_wrong_one_leaves_its_smallest_case(
    session, pytester
) -> None:
    source = support.ROOT / "tests" / "engines" / "plain_kernels.py"
    shutil.copy(source, pytester.path / "my_kernels.py")
    pytester.makepyfile(
        """
        import my_kernels

        def test_sound(lockstep_kernels):
            said = lockstep_kernels(my_kernels.Sound, "--limit", "4")
            assert said.json["pages_checked"] > 100

        def test_swapped(lockstep_kernels):
            lockstep_kernels(my_kernels.SwapsParts, "--limit", "4")
        """
    )
    result = session()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*divergence in step 0, page_written*"])
    assert list(pytester.path.glob(".lockstep/**/*.min.case.jsonl"))


# Several processes.


@pytest.fixture
def in_two_processes(pytester: pytest.Pytester):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")

    def run(*options: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(
            "-p", "xdist", "-p", "lockstep_pytest.plugin", "-n", "2", "-v", *options
        )

    return run


def outcomes(result: pytest.RunResult) -> list[str]:
    """ "PASSED lockstep::seed[3]" of each test, from either kind of run, in the order of names."""
    found = []
    for line in result.outlines:
        words = line.split()
        names = [word for word in words if "::" in word]
        ends = [word for word in words if word in ("PASSED", "FAILED", "SKIPPED", "XFAIL")]
        if names and ends:
            found.append(f"{ends[0]} {names[0]}")
    return sorted(set(found))


def test_several_processes_share_the_tests_and_find_the_same(
    session, in_two_processes, pytester
) -> None:
    put(pytester, SOUND, support.REGRESSIONS / FINDING)
    put_mutant(pytester)
    known = known_file(pytester, check=check_of_finding(), test=f"recording[{FINDING}]")
    options = ("--lockstep-cases", "cases", "--lockstep-seeds", "7:13", known)
    (pytester.path / "cases/below").mkdir()
    for path in list((pytester.path / "cases").glob("*.case.jsonl")):
        shutil.copy(path, pytester.path / "cases/below" / path.name)
    alone = session(*options, "-v")
    shared = in_two_processes(*options)
    assert len(outcomes(alone)) == 10
    # Which of the two tests of one bug stays the failure depends on the order of reports.
    tests = [
        sorted(row.replace("XFAIL", "FAILED") for row in outcomes(result))
        for result in (alone, shared)
    ]
    assert tests[0] == tests[1]
    for result in (alone, shared):
        assert result.parseoutcomes().items() >= {"passed": 7, "failed": 1, "xfailed": 2}.items()
        result.stdout.fnmatch_lines(["lockstep: *6 seeds decided by the model,*; 1 failure in 2 *"])
    # Cases of one name do not write over each other.
    smallest = sorted((pytester.path / ".lockstep").rglob("*.min.case.jsonl"))
    assert {path.parent.name for path in smallest} >= {".lockstep", "below"}


def test_the_fixture_works_in_several_processes(in_two_processes, stand_in, pytester) -> None:
    stand_in(True)  # writes the tests
    result = in_two_processes("--lockstep-record")
    result.assert_outcomes(failed=1, xfailed=1)
    assert len(list(pytester.path.glob(".lockstep/*/scheduler0-step0.jsonl"))) == 2


def test_a_wrong_option_is_one_sentence_there_too(in_two_processes) -> None:
    result = in_two_processes("--lockstep-seeds", "some")
    assert result.ret != 0
    text = result.stdout.str() + result.stderr.str()
    assert "--lockstep-seeds some: expected A:B" in text
    assert "INTERNALERROR" not in text
