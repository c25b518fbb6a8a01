"""Script that lets a shell complete commands, flags and their values, made from the parser."""

from __future__ import annotations

from collections.abc import Mapping

from weft.cli.parser import Parser, flag_of
from weft.config.config import OPTIONS

SHELLS = ("bash", "zsh")
SCRIPT = """\
# Completion of weft for {shell}, written by weft completion
{prepare}_weft() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[*]:1:COMP_CWORD-1}} words=
    case $previous in
{values}
    esac
    if [[ -z $words ]]; then
        case "$command " in
{flags}
        esac
    fi
    [[ -z $word && $words == --* ]] && words=  # rather files, such as a graph
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _weft weft
"""
PREPARE = {"bash": "", "zsh": "autoload -U compinit bashcompinit && compinit && bashcompinit\n"}


def completion_script(parser: Parser, shell: str, names: Mapping[str, list[str]]) -> str:
    """Return the script for a shell. Where it proposes nothing, the shell completes file names.

    Args:
        parser: Parser of all commands.
        shell: One of SHELLS.
        names: Values of options by name, in addition to those that `OPTIONS` lists.
    """
    values = {name: list(spec.metadata["choices"]) for name, spec in OPTIONS.items()} | dict(names)
    by_flag = [f'        {flag_of(name)}) words="{" ".join(words)}" ;;' for name, words in values.items() if words]
    patterns = ((f'"{path}"*' if path else '" "', words) for path, words in parser.words())
    by_command = [f'            {pattern}) words="{" ".join(words)}" ;;' for pattern, words in patterns]
    return SCRIPT.format(shell=shell, prepare=PREPARE[shell], values="\n".join(by_flag), flags="\n".join(by_command))
