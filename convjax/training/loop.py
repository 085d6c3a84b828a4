"""A run from its config to its result, continued wherever it was stopped.

Between two steps a run is its TrainState and its `Progress`; both are in every checkpoint, and what
comes next depends on nothing else. So a run that is killed and started again repeats it to the bit
(on a GPU with XLA_FLAGS=--xla_gpu_deterministic_ops=true). The host waits for the device only to
log, measure and save; there the metrics of each step are looked at, and only finite ones pass.

Several processes all run this, step by step together; the first one writes everything but its
share of the checkpoints.
"""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp

from convjax.training.checkpoint import Checkpoints, Progress, read_newest
from convjax.training.config import RunConfig, to_dict
from convjax.training.display import Display
from convjax.training.errors import StoppedError, reading_images
from convjax.training.evaluation import Evaluation, evaluate
from convjax.training.interruption import StopRequest, stop_requests
from convjax.training.meter import Meter, check_finite
from convjax.training.metrics import MetricsWriter, read_metrics
from convjax.training.parts import Parts, assemble
from convjax.training.processes import agreed, check_same, exchange, is_first
from convjax.training.result import Result, describe_devices
from convjax.training.state import count_parameters
from convjax.training.workdir import Workdir


def train(config: RunConfig, workdir: str | Path, *, started: float | None = None) -> Result:
    """Train as `config` says, in the folder `workdir`, and return what is in its result.json.

    The same call again continues a run that was stopped, and returns the result of a finished one.
    Several processes (`convjax.training.processes`) all call this, and see one folder.

    Args:
      config: the run.
      workdir: its folder, made where there is none; `convjax.training.workdir` lists the files.
      started: `time.perf_counter()` when the process began; now if it is not given.

    Raises:
      ConfigError: the config cannot be run, or the folder is another config's.
      RunError: the data is missing, the folder is in use or cannot be written, no checkpoint is
        whole, or a loss or gradient is not finite.
      StoppedError: SIGTERM or Ctrl-C came; the run is saved.
    """
    started = time.perf_counter() if started is None else started
    folder = Workdir(workdir)
    with contextlib.ExitStack() as resources:
        with agreed():
            if is_first():
                resources.enter_context(folder.claimed(config))
        stop = resources.enter_context(stop_requests())
        with agreed():
            folder.check_seen()
        with agreed():
            check_same(to_dict(config))
        if finished := _finished(folder):
            return finished
        with agreed():
            parts = assemble(config)
            if is_first():
                folder.write_config(config)
        return _Run(parts, folder, stop, started, resources).to_the_end()


def _finished(folder: Workdir) -> Result | None:
    """Return the result of a run that is finished, which the first process says."""
    finished = Result.read(folder.result)
    if not exchange("finished" if finished else "")[0]:
        return None
    if is_first():
        print(f"the run in {folder.path} is finished; nothing is done")
    return finished


class _Run:
    """One process's piece of a run."""

    def __init__(
        self,
        parts: Parts,
        folder: Workdir,
        stop: StopRequest,
        started: float,
        resources: contextlib.ExitStack,
    ) -> None:
        """Continue the run in `folder` from its newest checkpoint, or begin it."""
        self._parts, self._folder, self._stop = parts, folder, stop
        batch_size = parts.config.data.batch_size
        self._display = Display(parts.total_steps, batch_size, quiet=not is_first())
        resources.callback(self._display.close)
        self._batches = parts.train_data.iterator()
        resources.callback(self._batches.close)
        if saved := read_newest(folder.checkpoints, parts.abstract_state, self._display.say):
            self._state, progress = saved
            self._batches.set_state(progress.iterator)
        else:
            self._state, progress = parts.initial_state(), Progress(step=0, iterator={})
        self._step = self._saved_step = progress.step
        self._best_step, self._best_accuracy = progress.best_step, progress.best_accuracy
        self._evaluation: Evaluation | None = None
        self._started = started - progress.seconds
        self._meter = Meter(batch_size, progress.window, progress.training_seconds)
        self._checkpoints = Checkpoints(folder.checkpoints, keep=parts.config.keep_checkpoints)
        resources.callback(self._checkpoints.close)
        self._records: MetricsWriter | None = None
        with agreed():
            if is_first():
                self._records = MetricsWriter(folder.metrics, folder.tensorboard, progress.step)
                resources.callback(self._records.close)

    def to_the_end(self) -> Result:
        """Make the steps that are left."""
        self._compile()
        config, total_steps = self._parts.config, self._parts.total_steps
        while self._step < total_steps:
            signal_number = self._stop.before(self._step + 1)
            if signal_number is not None:
                self._save_and_stop(signal_number)
            with reading_images(f"step {self._step + 1}"):
                batch = self._parts.layout.placed(next(self._batches))
            self._state, metrics = self._train_step(self._state, batch)
            self._meter.add(metrics)
            self._step += 1
            at_end = self._step == total_steps
            if at_end or self._step % config.log_every_steps == 0:
                self._log()
            measured = at_end or self._step % self._parts.eval_every_steps == 0
            if measured:
                self._measure()
            if measured or self._step % config.checkpoint_every_steps == 0:
                self._save()
        return self._finish()

    def _compile(self) -> None:
        parts, state = self._parts, self._state
        left = f"steps {self._step} to {parts.total_steps}"
        self._display.say(f"{parts.summary(state)}, {describe_devices()}: {left}; compiling")
        with reading_images("the first batches"):
            batches = parts.train_data.batch(0), parts.test_data.batch(0)
        train_batch, test_batch = map(parts.layout.placed, batches)
        train_step = parts.train_step().lower(state, train_batch)
        eval_step = parts.eval_step().lower(state, test_batch)
        with ThreadPoolExecutor() as pool:  # XLA lets go of the interpreter while it compiles
            compiled = [pool.submit(step.compile) for step in (train_step, eval_step)]
            self._train_step, self._eval_step = (each.result() for each in compiled)
        self._meter.restart_clock()

    def _log(self) -> None:
        self._meter.fetch(self._step)
        self._checkpoints.check()
        seen = self._meter.summary()
        learning_rate = float(jnp.asarray(self._parts.schedule(self._step - 1)))
        self._write_record(**seen, learning_rate=learning_rate)
        self._display.show(self._step, seen["loss"], seen["images_per_second"])

    def _measure(self) -> None:
        self._meter.fetch(self._step)
        evaluation = evaluate(self._eval_step, self._state, self._parts)
        accuracy = evaluation.accuracy
        check_finite({"test loss": evaluation.loss}, self._step)
        if self._best_accuracy is None or accuracy >= self._best_accuracy:
            self._best_accuracy, self._best_step = accuracy, self._step
        self._write_record(test_loss=evaluation.loss, test_accuracy=accuracy)
        self._display.say(f"step {self._step}: test accuracy {accuracy:.4f}")
        self._evaluation = evaluation
        self._meter.restart_clock()

    def _write_record(self, **values: float) -> None:
        if self._records is None:
            return
        values["epoch"] = self._step / self._parts.train_data.steps_per_epoch
        values["seconds"] = time.perf_counter() - self._started
        self._records.write({"step": self._step, **values})

    def _save(self) -> None:
        self._meter.fetch(self._step)
        progress = Progress(
            step=self._step,
            iterator=self._batches.get_state(),
            window=tuple(self._meter.window),
            best_step=self._best_step,
            best_accuracy=self._best_accuracy,
            seconds=time.perf_counter() - self._started,
            training_seconds=self._meter.training_seconds,
        )
        self._checkpoints.save(self._state, progress)
        self._saved_step = self._step
        self._meter.restart_clock()

    def _save_and_stop(self, signal_number: int) -> NoReturn:
        if self._step > self._saved_step:
            self._save()
        self._checkpoints.wait()
        why = f"stopped by {signal.Signals(signal_number).name} after step {self._step}"
        where = f"of {self._parts.total_steps}, in {self._folder.path}; the same command continues"
        stopped = StoppedError(f"{why} {where}", signal_number)
        stopped.agreed = True
        raise stopped

    def _finish(self) -> Result:
        """Draw the pictures and write result.json, the sign of a finished run, last of all."""
        self._checkpoints.wait()
        parts, config = self._parts, self._parts.config
        evaluation = self._evaluation or evaluate(self._eval_step, self._state, parts)
        result = Result(
            model=config.model.name,
            dataset=config.data.name,
            seed=config.seed,
            steps=self._step,
            test_accuracy=evaluation.accuracy,
            test_loss=evaluation.loss,
            best_step=self._best_step or self._step,
            best_test_accuracy=self._best_accuracy or evaluation.accuracy,
            wall_seconds=time.perf_counter() - self._started,
            images_per_second=self._step * config.data.batch_size / self._meter.training_seconds,
            parameters=count_parameters(self._state),
            mesh={axis: size for axis, size in parts.layout.mesh.shape.items() if size > 1},
        )
        with agreed():
            if is_first():
                self._draw(evaluation)
                result.write(self._folder.result)
        return result

    def _draw(self, evaluation: Evaluation) -> None:
        from convjax.training.pictures import draw_curves, draw_predictions  # seconds of imports

        draw_curves(read_metrics(self._folder.metrics), self._folder.curves)
        predictions = self._folder.predictions
        draw_predictions(self._parts.test_data, evaluation.predictions, predictions)
