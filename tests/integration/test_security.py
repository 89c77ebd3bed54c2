"""Our own sources: nothing that runs code from a file, or a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("detr", "ops", "tools")
# reads legacy weight files with an allow-list of what tensors are made of; test_files.py tries to get past it
RESTRICTED_PICKLE = "_TensorPickle"
# what unpickles, evaluates or runs a command line
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__"),
    *("pickle.load", "pickle.loads", "dill.load", "joblib.load", "marshal.loads"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.hub.load", "np.load", "numpy.load", "pd.read_pickle"),
}


def faults_in(source: str) -> list[str]:
    """The calls in `source` that must not be there, as line number and name."""
    return list(_faults(ast.parse(source)))


def _faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in FORBIDDEN:
            yield f"line {node.lineno}: {name}"
        elif name == "torch.load" and not (
            arguments.get("weights_only") == "True" or arguments.get("pickle_module") == RESTRICTED_PICKLE
        ):
            yield f"line {node.lineno}: torch.load without weights_only=True"
        elif arguments.get("shell", "False") != "False":
            yield f"line {node.lineno}: {name} through a shell"
        elif name.endswith("__version__.split") or (name == "float" and "__version__" in ast.unparse(node)):
            yield f"line {node.lineno}: a version read as a number"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_code_from_files_and_no_shell(repository: Path, folder: str):
    paths = sorted((repository / folder).rglob("*.py"))
    assert paths
    found = {str(path): faults for path in paths if (faults := faults_in(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, pickle_module=pickle)",
        "pickle.load(file)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(command, shell=True)",
        "os.system('ls')",
        "eval('1')",
        "float(torchvision.__version__[:3])",
    ],
)
def test_the_search_finds_what_it_is_for(source: str):
    assert len(faults_in(source)) == 1
