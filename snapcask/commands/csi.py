"""`snapcask csi`: serve volumes to Kubernetes, and look after their references."""

from __future__ import annotations

import asyncio

import click

from snapcask.commands import csi_volumes


@click.group(invoke_without_command=True)
@click.option(
    "--endpoint", metavar="URL", envvar="CSI_ENDPOINT", show_envvar=True,
    help="Where to listen: unix:///path/to.sock.",
)  # fmt: skip
@click.option(
    "--config", "config_path", metavar="FILE",
    type=click.Path(dir_okay=False), help="The configuration, a JSON file.",
)  # fmt: skip
@click.option(
    "--service", type=click.Choice(["node", "controller", "all"]), default="all",
    show_default=True, help="Which services to offer.",
)  # fmt: skip
@click.option(
    "--node-name", metavar="NAME", envvar="NODE_NAME", show_envvar=True,
    help="Name of this node, in place of that in the configuration.",
)  # fmt: skip
@click.pass_context
def command(
    context: click.Context,
    endpoint: str | None,
    config_path: str | None,
    service: str,
    node_name: str | None,
) -> None:
    """Serve images to Pods as read-only volumes, until it is told to end.

    What is mounted stays mounted then. Logs are JSON lines on standard error. Needs --endpoint and
    --config.
    """
    if context.invoked_subcommand is not None:
        return
    if not endpoint or not config_path:
        missing = "--config" if endpoint else "--endpoint"
        raise click.UsageError(f"Missing option '{missing}'.", context)
    _serve(endpoint, config_path, service, node_name)


def _serve(endpoint: str, config_path: str, service: str, node_name: str | None) -> None:
    from csi.config import check_node_name
    from csi.config_file import read_config
    from imgfmt.errors import Unsupported
    from snapcask import __version__, interrupts

    config = read_config(config_path)
    try:
        from csi.endpoint import Endpoint
        from csi.server import Service, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("grpc", "google", "prometheus_client"):
            raise
        raise Unsupported(f"`csi` needs the package {error.name}; install snapcask[csi]") from error
    where = Endpoint.parse(endpoint)
    name = check_node_name(node_name)
    work = serve(config, where, version=__version__, service=Service(service), node_name=name)
    interrupts.remove()
    asyncio.run(work)


command.add_command(csi_volumes.command)
