"""The function of FluidFaaS, Figure 7, with arithmetic in the place of models: 1, 2 -> 3 -> 4 -> 5.

    CUDA_VISIBLE_DEVICES=MIG-… python3 example.py 1g.10gb > small.json      prints the DAG with its profile on this slice
    CUDA_VISIBLE_DEVICES=MIG-… python3 example.py 2g.20gb small.json        prints it with the profile on a second slice as well
    python3 example.py                  is a stage, when `gshare up` starts it as one (PORT, GSHARE_COMPONENTS, GSHARE_STAGE)"""

import json
import sys

import gshare_ffs as FFS


class Model1(FFS.Module):
    def forward(self, x):
        return x + 1


class Model2(FFS.Module):
    def forward(self, x):
        return x * 2


class Model3(FFS.Module):
    def forward(self, a, b):
        return a + b


class Model4(FFS.Module):
    def forward(self, x):
        return x * x


class Model5(FFS.Module):
    def forward(self, x, y):
        return x - y


class MyFFaaS(FFS.FFaaS):
    def defDAG(self, x, y):
        x1 = Model1.reg(self, x)
        x2 = Model2.reg(self, x)
        x3 = Model3.reg(self, x1, x2)
        x4 = Model4.reg(self, x3)
        return Model5.reg(self, x4, y)


def handler_run(event, context):
    MyFFaaS(event, context, FFS.RUN).run()


def handler_build(event, context):
    return MyFFaaS(event, context, FFS.BUILD_DAG).profile(3, 4, slice=event["slice"], onto=event["onto"])


if __name__ == "__main__":
    if sys.argv[1:]:
        onto = json.load(open(sys.argv[2])) if sys.argv[2:] else None
        print(json.dumps(handler_build({"slice": sys.argv[1], "onto": onto}, None)))
    else:
        handler_run(None, None)
