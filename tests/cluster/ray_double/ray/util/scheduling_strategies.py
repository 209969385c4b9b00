class NodeAffinitySchedulingStrategy:
    def __init__(self, node, soft):
        self.node = node


class PlacementGroupSchedulingStrategy: ...
