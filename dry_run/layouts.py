"""Which slice of a parameter a rank holds, by the layout that MindSpore gives the parameter in a graph."""
import math


def cutting_axes(layout):
    """The axes of the device matrix that cut a parameter, counted from the left."""
    axes = {axis for entry in layout[1] for axis in (entry if isinstance(entry, (list, tuple)) else [entry])}
    return {len(layout[0]) - 1 - axis for axis in axes if axis >= 0}


def held_alike(layout):
    """Do several ranks of a stage hold the same of a parameter?"""
    return not layout[5] and math.prod(layout[0][axis] for axis in cutting_axes(layout)) < math.prod(layout[0])


def unlike_shapes(shapes):
    """Parameters that ranks cut though they have built them in unlike shapes: [(a sentence, a rank, another)].

    Args:
        shapes: of each rank {name: full shape} of the parameters that it has a slice of.
    """
    told, first = {}, {}
    for rank, own in shapes.items():
        for name, shape in own.items():
            other, theirs = first.setdefault(name, (rank, shape))
            if tuple(shape) != tuple(theirs):
                told.setdefault(name, (
                    f"parameter {name!r}, which the plan cuts, is {tuple(theirs)} on rank {other} and {tuple(shape)} "
                    f"on rank {rank}; build one network on all ranks", other, rank))
    return list(told.values())


def sliced_over(rank, layout, shape, groups):
    """The ranks that together hold a parameter once.

    Args:
        rank: the rank asked.
        layout: MindSpore's layout of the parameter: device matrix, tensor map (for each dimension the axis
            of the device matrix that cuts it, counted from the right, or -1), slice shape, ..., at 5 the
            group over which the optimizer cuts it further.
        shape: the shape that is left in the graph.
        groups: of each group's name its ranks.
    """
    matrix, group = layout[0], layout[5]
    axes, devices = cutting_axes(layout), math.prod(matrix)

    def place(device):
        """Of one device its coordinates along the axes that do not cut the parameter."""
        found = []
        for axis in reversed(range(len(matrix))):
            device, at = divmod(device, matrix[axis])
            if axis not in axes:
                found.append(at)
        return found

    members = groups.get(group, [rank]) if list(shape) != list(layout[2]) else [rank]
    over = set()
    for member in members:
        start = member // devices * devices
        over |= {start + device for device in range(devices) if place(device) == place(member - start)}
    return sorted(over)


def slice_begin(rank, layout, shape, groups):
    """Where in the whole parameter a rank's slice begins, for each dimension; arguments as of `sliced_over`."""
    matrix, tensor_map, group = layout[0], layout[1], layout[5]
    device, places = rank % math.prod(matrix), []  # places: the device's coordinates, the last axis first
    for length in reversed(matrix):
        device, at = divmod(device, length)
        places.append(at)
    begin = []
    for entry, size in zip(tensor_map, layout[2]):
        number = 0  # of this slice along this dimension; several axes may cut it, the outer one is named first
        for axis in entry if isinstance(entry, (list, tuple)) else [entry]:
            if axis >= 0:
                number = number * matrix[len(matrix) - 1 - axis] + places[axis]
        begin.append(number * size)
    if list(shape) != list(layout[2]) and rank in groups.get(group, ()):  # the optimizer cuts the first dimension
        begin[0] += sorted(groups[group]).index(rank) * shape[0]
    return begin


def parameters_of(obj):
    """{name: Parameter} of what a graph is compiled from, a cell or a function."""
    return dict(obj.parameters_dict()) if hasattr(obj, "parameters_dict") else {}


class Slices:
    """The slices that lie on a rank. MindSpore cuts a parameter when it compiles the first graph that has it, and never
    again, also on cards: a later graph that wants it cut otherwise gets wrong shapes, or wrong numbers."""

    def __init__(self):
        self.held = {}  # id of a Parameter: (the Parameter, its slice)

    def wrong(self, parameters, layouts, rank):
        """Whether a graph that was just compiled can work on the slices of the graphs before it.

        Args:
            parameters: {name: Parameter} of the graph.
            layouts: {name: layout} of the graph.
            rank: this rank.

        Returns:
            A sentence, or None where it can.
        """
        for name, layout in layouts.items():
            if name not in parameters:
                continue
            parameter, begin = parameters[name], slice_begin(rank, layout, layout[2], {})
            wanted = tuple(layout[2]), tuple(begin), layout[5]
            held = self.held.setdefault(id(parameter), (parameter, wanted))[1]
            if held != wanted:
                return (f"this graph wants another slice of {name!r} than rank {rank} holds since an earlier graph: "
                        f"{wanted[0]} from {wanted[1]} on, not {held[0]} from {held[1]} on; MindSpore cuts a parameter "
                        "once, also on cards. Give both graphs the same strategies and the same batch, or compile one "
                        "of them in a job of its own, from a checkpoint")
        return None
