"""Errors that a frame keeps: the error's traceback knows the frame, and so only the garbage collector frees either.

With them waits all that the frames on the way knew: sinks, sockets, whole models. `except E as error` forgets it by
itself. Any other variable that holds an error which the same function raises or has caught must be forgotten there too
(`del failure`), or the error be made in a function of its own. Not seen here: a frame knows its caller, so a variable
that is given a caught error by what it calls is another such (`error.with_traceback(None)` helps). A context manager of
`contextlib` is, where its generator catches an error and raises another: those of `transport.scopes` are not.
"""

import ast
from collections.abc import Iterator, Sequence

from .sources import FunctionNode, Source, functions_of


def circle_violations(source: Source) -> list[str]:
    """Variables that hold an error of their own frame and are never deleted."""
    return [
        f"{source.at(node)}: {function.name} keeps an error in {name!r}, whose traceback knows this frame; del it"
        for function in functions_of(source)
        for name, node in _kept(function)
        if name not in _deleted(function)
    ] + [
        f"{source.at(node)}: {function.name} raises another error than it has caught, and `contextlib` keeps that one: "
        "make it a `scope` (transport.scopes)"
        for function in functions_of(source)
        if any(ast.unparse(each).endswith("contextmanager") for each in function.decorator_list)
        for node in _raised_anew(function)
    ]


def _raised_anew(function: FunctionNode) -> Iterator[ast.AST]:
    """Where the block's error is caught and another one is raised."""
    for node in _own_nodes(function):
        if isinstance(node, ast.Try) and any(isinstance(each, ast.Yield) for each in _nodes(node.body)):
            for handler in node.handlers:
                yield from (each for each in _nodes(handler.body) if isinstance(each, ast.Raise) and each.exc)


def _kept(function: FunctionNode) -> Iterator[tuple[str, ast.AST]]:
    own = list(_own_nodes(function))
    caught = {node.name for node in own if isinstance(node, ast.ExceptHandler) and node.name}
    for node in own:
        match node:
            case ast.Raise(exc=ast.Name(id=name)) if name not in caught and not name[0].isupper():
                yield name, node
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=error)) if error in caught:
                yield name, node
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id=name), attr="__cause__")], value=ast.Name(id=error)
            ):
                if error in caught:
                    yield name, node
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[ast.Name(id=error)]):
                if error in caught:
                    yield name, node


def _deleted(function: FunctionNode) -> set[str]:
    return {
        target.id
        for node in _own_nodes(function)
        if isinstance(node, ast.Delete)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """What stands in this function, and not in one that stands in it."""
    yield from _nodes(function.body)


def _nodes(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*FunctionNode.__args__, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
