"""What `--help` says: the text at the top of a tool's file, and the groups of its configuration."""

import textwrap

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

# of Hydra itself, or of one machine: nothing a newcomer chooses
_HIDDEN_GROUPS = ("hydra", "local", "sweep")


def help_text(description: str, config_name: str, config_dir: str) -> str:
    """The help of a tool.

    Args:
        description: What the tool does, its keys, examples and output.
        config_name: Its configuration.
        config_dir: Folder of the configurations.
    """
    with initialize_config_dir(config_dir, version_base="1.3"):
        choices = compose(config_name, return_hydra_config=True).hydra.runtime.choices
        loader = GlobalHydra.instance().config_loader()
        options = {
            str(group): [str(option) for option in loader.get_group_options(str(group))]
            for group in reversed(list(choices))
            if str(group).partition("/")[0] not in _HIDDEN_GROUPS
        }
    lines = []
    for group, names in options.items():
        if len(names) > 1:
            first = "none" if choices[group] is None else str(choices[group])
            text = ", ".join([first, *(name for name in names if name != first)])
            lines += textwrap.wrap(text, 118, initial_indent=f"  {group:<12} ", subsequent_indent=" " * 15)
    groups = "\nGroups, as group=option (first: what is used unless you choose):\n" + "\n".join(lines) + "\n"
    return (
        f"{description.strip()}\n{groups if lines else ''}\nKeys are given as key=value. All of them, with the values "
        f"they would have:\n  python tools/{config_name}.py --cfg job\nHydra's own options: --hydra-help\n"
    )
