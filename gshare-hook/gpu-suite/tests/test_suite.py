"""Comparison of outcomes, choice of environments, arguments and tables, without a driver."""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock

from gpusuite import context, table
from gpusuite.environments import Environment, Environments, make
from gpusuite.errors import ArgumentError, Failed, NotInstalled, OutOfTime
from gpusuite.programs import Program
from gpusuite.rows import all_rows, cost, outcomes, parking

SUITE = pathlib.Path(__file__).resolve().parent.parent


def answer(**more):
    work = {"kernels": 3, "copies": 1, "copied_bytes": 8}
    return {"case": "x", "facts": {"copied": True}, "values": "aa", "work": work, "seconds": 0.1, **more}


class Outcomes(unittest.TestCase):
    def compare(self, bare, hooked, simulated=True, counted=True, computes=False):
        machine = types.SimpleNamespace(simulated=simulated)
        return outcomes.compare(types.SimpleNamespace(machine=machine, note=lambda **_: None), bare, hooked, counted, computes)

    def test_equal_successes_pass_and_say_that_values_were_not_compared(self):
        self.assertIn("values not compared", self.compare(answer(), answer(values="bb")))

    def test_two_equal_failures_show_nothing(self):
        failure = {"case": "x", "error": "error 500"}
        with self.assertRaisesRegex(Failed, "bare: error 500; hooked: error 500"):
            self.compare(failure, failure)

    def test_facts_that_differ_fail(self):
        with self.assertRaisesRegex(Failed, "copied differs"):
            self.compare(answer(), answer(facts={"copied": False}))

    def test_a_copy_that_is_wrong_both_times_fails(self):
        wrong = answer(facts={"copied": False})
        with self.assertRaisesRegex(Failed, "did not come back"):
            self.compare(wrong, wrong)

    def test_work_that_the_device_counted_is_compared(self):
        other = answer(work={"kernels": 4, "copies": 1, "copied_bytes": 8})
        with self.assertRaisesRegex(Failed, "device counted"):
            self.compare(answer(), other)
        self.assertIn("not compared", self.compare(answer(), other, counted=False))

    def test_values_are_compared_on_a_simulated_gpu_that_computes(self):
        self.assertIn("values equal", self.compare(answer(), answer(), computes=True))
        with self.assertRaisesRegex(Failed, "values differ"):
            self.compare(answer(), answer(values="bb"), computes=True)

    def test_values_are_compared_on_a_gpu(self):
        real = answer(work=None)
        self.assertIn("values equal", self.compare(real, real, simulated=False))
        with self.assertRaisesRegex(Failed, "values differ"):
            self.compare(real, answer(work=None, values="bb"), simulated=False)


class Starts(unittest.TestCase):
    """The row of starts over a clock and programs of this class: a start takes 5 s bare and 5.1 s hooked."""

    def judged(self, minutes):
        clock = types.SimpleNamespace(now=0.0)

        def workload(_python, _name, _script, hooked=None):
            def finish(_most):
                clock.now += 5.1 if hooked else 5.0
                return 0, ""

            return types.SimpleNamespace(finish=finish)

        node = types.SimpleNamespace(workload=workload)
        machine = types.SimpleNamespace(node=lambda: contextlib.nullcontext(node))
        with unittest.mock.patch("time.monotonic", lambda: clock.now):
            run = context.Context(machine, None, "full", [], minutes)
            run.environment = lambda _needs: types.SimpleNamespace(python="python")
            return cost.Start("torch", ())(run), clock.now

    def test_pairs_that_were_counted_are_judged_where_the_time_of_the_run_ends(self):
        text, seconds = self.judged(minutes=1.6)
        self.assertIn("+2.00 [+2.00, +2.00] %", text)
        self.assertLess(seconds, 96)
        self.assertAlmostEqual(self.judged(minutes=None)[1], 13 * 10.1)

    def test_too_few_pairs_are_no_time(self):
        with self.assertRaises(OutOfTime):
            self.judged(minutes=0.8)


class Parked(unittest.TestCase):
    """A program of one step over a node of this class, which parks 10 bytes twice."""

    def figure(self, copied_bytes, kept=True):
        def workload(_python, _script, _case, hooked=None, env=None):
            work = {"kernels": 3, "copies": 1, "copied_bytes": copied_bytes if hooked else 8}
            answers = [{"step": 0}, answer(facts={"copied": True, "kept": kept or not hooked}, work=work)]
            return types.SimpleNamespace(
                hear=lambda _most: answers.pop(0), say=lambda _line: None, finish=lambda _most: (0, []),
            )

        clients = [{"parking": {"bytes": 10, "residence": "resident"}}, {"parking": None}]
        node = types.SimpleNamespace(
            workload=workload, gshare=lambda *_words, timeout: "", clients=lambda _name: clients,
        )
        machine = types.SimpleNamespace(node=lambda: contextlib.nullcontext(node), simulated=True)
        run = context.Context(machine, None, "full", [], None)
        run.environment = lambda _needs: types.SimpleNamespace(python="python")
        return parking.Steps("driver", ())(run)

    def test_moves_show_in_the_account_of_the_device(self):
        self.assertIn("parked 2 times", self.figure(8 + 2 * 20))
        with self.assertRaisesRegex(Failed, "20 bytes were parked, and the device copied 19"):
            self.figure(8 + 19)

    def test_an_outcome_that_differs_fails(self):
        with self.assertRaisesRegex(Failed, "kept differs"):
            self.figure(48, kept=False)


class Choice(unittest.TestCase):
    def setUp(self):
        one = Environment("one", pathlib.Path("python"), "3.11", {"cuda-bindings": "12.9.1"})
        two = Environment("two", pathlib.Path("python"), "3.11", {"cuda-bindings": "13.5.0", "torch": "2.15.0"})
        self.environments = Environments([one, two])

    def test_the_first_environment_with_all_packages_is_taken(self):
        self.assertEqual(self.environments.meeting({"cuda-bindings": "13"}).name, "two")
        self.assertEqual(self.environments.meeting({"cuda-bindings": ""}).name, "one")
        self.assertEqual(self.environments.meeting({}).name, "one")

    def test_a_version_is_a_beginning_by_parts(self):
        with self.assertRaisesRegex(NotInstalled, "cuda-bindings 1"):
            self.environments.meeting({"cuda-bindings": "1"})

    def test_wrong_arguments_name_the_option(self):
        for arguments in (["torch"], ["torch=/nowhere"], [f"a={sys.executable}", f"a={sys.executable}"]):
            with self.assertRaises(ArgumentError) as caught:
                Environments.given(arguments)
            self.assertEqual(caught.exception.field, "--venv")
        with self.assertRaisesRegex(ArgumentError, "--groups"):
            make(tempfile.gettempdir(), ["nothing"])


class Rows(unittest.TestCase):
    def test_names_are_unique_and_every_form_has_rows(self):
        names = [row.name for row in all_rows()]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual({form for row in all_rows() for form in row.forms}, {"full", "short", "ci"})

    def test_ci_measures_nothing(self):
        kinds = {row.kind for row in all_rows() if "ci" in row.forms}
        self.assertTrue(kinds.isdisjoint({"share", "cost"}), kinds)


class Programs(unittest.TestCase):
    def start(self, code):
        return Program([sys.executable, "-c", code], None, "program")

    def test_marked_lines_are_answers_and_others_are_not(self):
        with self.start("print('noise'); print('suite: {\"a\": 1}')") as program:
            self.assertEqual(program.finish(20), (0, [{"a": 1}]))
            self.assertEqual(program.last_line, "noise")

    def test_an_early_end_says_the_code_and_the_error(self):
        with self.start("raise SystemExit('the reason')") as program, self.assertRaisesRegex(Failed, "exit code 1.*the reason"):
            program.hear(20)

    def test_a_program_that_takes_too_long_is_ended(self):
        with self.start("import time; time.sleep(600)") as program:
            self.assertEqual(program.finish(0.2), (None, []))
            self.assertIsNotNone(program.child.poll())


class Order(unittest.TestCase):
    def context(self, rows, side_by_side):
        machine = types.SimpleNamespace(simulated=True)
        made = context.Context(machine, Environments([]), "short", rows, 1.0)
        made.side_by_side = side_by_side
        return made

    def test_rows_that_need_not_be_alone_run_side_by_side_before_the_others_and_keep_their_figures(self):
        meeting = threading.Barrier(2)

        def together(own):
            # Two cases which do not run at the same time never meet here.
            meeting.wait(20)
            own.note(by=threading.get_ident())
            return "met"

        def alone(own):
            self.assertEqual(own.figures, {})
            return "alone"

        rows = [
            context.Row("first", "share", alone), context.Row("a", "outcome", together, alone=False),
            context.Row("b", "outcome", together, alone=False),
        ]
        lines = list(self.context(rows, 2).carry_out_all(rows))
        self.assertEqual(sorted(line["row"] for line in lines[:2]), ["a", "b"])
        self.assertEqual([line["figure"] for line in lines], ["met", "met", "alone"])
        self.assertNotEqual(lines[0]["figures"]["by"], lines[1]["figures"]["by"])

    def test_cases_of_one_batch_run_one_after_the_other(self):
        threads = []

        class Case:
            batch = "one"

            def __call__(self, own):
                threads.append(threading.get_ident())
                return "done"

        rows = [context.Row(f"r{i}", "outcome", Case(), alone=False) for i in range(4)]
        self.assertEqual(len(list(self.context(rows, 4).carry_out_all(rows))), 4)
        self.assertEqual(len(set(threads)), 1)


class Tables(unittest.TestCase):
    def report(self, simulated, *results):
        rows = [
            {"row": f"r{i}", "kind": "own", "result": result, "figure": "f|g", "seconds": 1.0, "simulated": simulated}
            for i, result in enumerate(results)
        ]
        device = {"name": "A100", "driver": "13.2", "simulated": simulated}
        return {
            "rows": rows, "device": device, "seconds": 2.0, "form": "ci", "date": "d", "gshare": "0", "host": {"cpus": 2},
            "environments": [],
        }

    def test_a_simulated_device_is_named_in_every_line(self):
        text = table.text(self.report(True, "ok"))
        self.assertTrue(all(line.startswith(("sim ", "SIMULATED")) for line in text.splitlines()), text)
        self.assertNotIn("SIMULATED", table.text(self.report(False, "ok")))
        self.assertIn("no figure is a GPU's", table.matrix(self.report(True, "ok")))

    def test_the_last_of_several_reports_counts_and_devices_are_not_mixed(self):
        first, last = self.report(True, "FAILED", "ok"), self.report(True, "ok")
        merged = table.merge([first, last])
        self.assertEqual([row["result"] for row in merged["rows"]], ["ok", "ok"])
        self.assertEqual(merged["seconds"], 4.0)
        with self.assertRaisesRegex(ValueError, "different devices"):
            table.merge([first, self.report(False, "ok")])

    def test_exit_codes(self):
        for results, strict, code in [
            (["ok", "not installed"], False, 0), (["ok", "not installed"], True, 1), (["ok", "noisy"], False, 3),
            (["MISSED", "noisy"], False, 1), (["FAILED"], False, 1), (["no time"], False, 3),
        ]:
            self.assertEqual(table.exit_code(self.report(True, *results), strict), code, results)


class Command(unittest.TestCase):
    def run_suite(self, *arguments):
        return subprocess.run([sys.executable, SUITE / "suite.py", *arguments], capture_output=True, text=True)

    def test_wrong_arguments_end_with_2_and_name_the_option(self):
        for arguments, word in [
            (["--only", "nothing"], "--only"), (["--bin", "/nowhere"], "--bin"), (["--from", "/nowhere"], "--from"),
            (["--venv", "x"], "--venv"),
        ]:
            done = self.run_suite(*arguments)
            self.assertEqual(done.returncode, 2, done)
            self.assertIn(word, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
