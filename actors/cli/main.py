"""The `cpd-ray` command: what it is called with, and the help that teaches it.

Owns the commands' names, options and help; the work is done in the modules beside it, which are imported when a command runs, so that the help
appears at once. Invariant: a command ends with 0 when it did what was asked, 1 when the world was against it, 2 when it was asked wrongly, and
tells the reason in one line on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cpd_ray.errors import ConfigError, CPDError

app = typer.Typer(
    name="cpd-ray",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="""Serve long prompts fast: cache-aware prefill-decode disaggregation on Ray.

**First steps**

- `cpd-ray serve` - serve a small chat model on this machine, until Ctrl-C
- `cpd-ray chat` - talk to it from another terminal; each answer says how much of the prompt was cached
- `cpd-ray status --watch` - watch workers, pools and caches meanwhile

**On a cluster**

- `cpd-ray config check FILE` - find what is wrong with a configuration, without a cluster
- `cpd-ray deploy FILE` - bring it to a running Ray cluster

Commands that talk to a running system take `--url` (or `CPD_URL`) and `--key` (or `CPD_API_KEY`).""",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at a configuration file, without a cluster.")
app.add_typer(config_app, name="config")

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}
"""For commands whose arguments another program reads, its `--help` among them."""

Url = Annotated[str, typer.Option(envvar="CPD_URL", help="Where the system answers.")]
Key = Annotated[str, typer.Option(envvar="CPD_API_KEY", help="An API key, where the system asks for one.")]
AsJson = Annotated[bool, typer.Option("--json", help="The plain answer, for programs.")]
Chat = Annotated[bool, typer.Option("--chat", help="Take the text as a chat's first message (else as a plain prompt).")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command(context_settings=PASS_ON)
def serve(context: typer.Context) -> None:
    """Serve on this machine, in a Ray cluster of its own, until Ctrl-C.

    Prepares the model, starts everything and says `ready on http://...` when requests are answered. See `cpd-ray serve --help` for its options.
    """
    from actors.cli.serve import main as serve_main

    raise typer.Exit(serve_main(context.args))


@app.command()
def deploy(
    file: Annotated[Path, typer.Argument(help="A YAML file as `serve deploy` takes it, for instance configs/local.yaml.")],
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="The dashboard of the running Ray cluster.")
    ] = "http://127.0.0.1:8265",
    wait_s: Annotated[float, typer.Option(help="How long to wait until all applications run; 0 returns at once.")] = 600.0,
    check: Annotated[bool, typer.Option(help="Check the file first, as `cpd-ray config check` does.")] = True,
) -> None:
    """Bring a configuration to a running Ray cluster: check it, `serve deploy` it, wait until it runs.

    The cluster's processes must find this project: start Ray with PYTHONPATH set to its folder. Deploying again changes what differs: what is
    under `user_config` changes without a restart, and a change of `cpd` leaves the caches of `cpd-kv` warm.
    """
    from actors.cli.checking import check_file
    from actors.cli.deploying import deploy_file
    from actors.cli.views import problems

    if check:
        checked = check_file(file)
        if checked.problems:
            problems(checked)
            raise typer.Exit(2)
    deploy_file(file, address, wait_s)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    key: Key = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking, until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between looks.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """What runs: requests, each worker's backlog and pool, each node's slab, the directory.

    **Backlog** is prefill that waits, in predicted seconds. A **pool** is one worker's own KV, in blocks; a **slab** is a node's DRAM tier, in
    slots of one block.
    """
    from actors.cli import views
    from actors.cli.api import Api

    with Api(url, key) as api:
        if watch:
            views.watch(api, views.every(every_s))
        elif as_json:
            views.plain(api.status().raw)
        else:
            views.show(views.status_view(api.status()))


@app.command()
def plan(
    text: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input, `@FILE` from a file.")],
    chat: Chat = False,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """What would be decided for a prompt now, and why, without running it.

    Shows every worker that was considered: the tokens that it would find cached by tier (its own **pool**, its **node**'s slab, the rest of the
    **cluster**), what it would have to compute, and the predicted seconds to the first token.
    """
    from actors.cli import views
    from actors.cli.api import Api, body_of

    with Api(url, key) as api:
        planned = api.plan(body_of(text, chat=chat))
    if as_json:
        views.plain(planned.raw)
    else:
        views.show(views.plan_view(planned))


@app.command()
def warm(
    files: Annotated[list[Path], typer.Argument(help="Text files, each one context.")],
    ttl_s: Annotated[float, typer.Option(min=1, help="For how many seconds they stay cached, within the pin budget.")] = 600.0,
    chat: Annotated[bool, typer.Option(help="As a chat's system message (else as the beginning of plain prompts).")] = True,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: AsJson = False,
) -> None:
    """Compute documents' KV before users come, so that the first who asks about one gets a warm answer.

    Later requests must begin with exactly the same text: a chat with the document as its system message, or a prompt that starts with it.
    """
    from actors.cli import views
    from actors.cli.api import Api, read_text

    with Api(url, key) as api:
        for file in files:
            body = {"messages": [{"role": "system", "content": read_text(file)}]} if chat else {"prompt": read_text(file)}
            warmed = api.warm({**body, "ttl_s": ttl_s})
            if as_json:
                views.plain(warmed.raw)
            else:
                views.show(views.warmed_line(str(file), warmed))


@app.command()
def chat(
    system: Annotated[str, typer.Option(help="The system message; `@FILE` reads it from a file.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.7,
    url: Url = DEFAULT_URL,
    key: Key = "",
) -> None:
    """Talk to the model; under each answer stands its time to first token and how much of the prompt was cached.

    Ctrl-C ends an answer, `/reset` begins anew, `/exit` or Ctrl-D leaves.
    """
    from actors.cli.api import Api, text_of
    from actors.cli.chatting import Conversation

    with Api(url, key) as api:
        Conversation(api, text_of(system), {"max_tokens": max_tokens, "temperature": temperature}).run()


@app.command(context_settings=PASS_ON)
def demo(context: typer.Context) -> None:
    """The effect on your own machine: one document asked about cold, then warm from each tier, then a follow-up turn.

    Needs a checkout of the project. See `cpd-ray demo --help` for its options.
    """
    from actors.cli.checkout import run_module

    raise typer.Exit(run_module("bench.demo", context.args))


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Run one of the project's benchmarks: `cpd-ray bench NAME [ITS OPTIONS]`; without a name, list them.

    Needs a checkout of the project. See `cpd-ray bench NAME --help` for a benchmark's options.
    """
    from actors.cli.checkout import benchmarks, run_module
    from actors.cli.views import bench_view, show

    known = benchmarks()
    if not context.args or context.args[0] not in known:
        show(bench_view(known))
        raise typer.Exit(0 if not context.args or context.args[0] in ("--help", "-h") else 2)
    raise typer.Exit(run_module(known[context.args[0]].module, context.args[1:]))


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="A YAML file as `serve deploy` takes it.")],
    model: Annotated[bool, typer.Option(help="Also against the model's own sizes (fetches its config.json when need be).")] = True,
) -> None:
    """Find what is wrong with a configuration, and show what it comes to.

    Every wrong key is named with its path and what would be right. Needs no cluster.
    """
    from actors.cli import views
    from actors.cli.checking import check_file

    checked = check_file(file, with_model=model)
    views.show(views.config_view(checked))
    if checked.problems:
        views.problems(checked)
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `cpd-ray`; ends the process."""
    try:
        app(arguments, prog_name="cpd-ray")
    except CPDError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
