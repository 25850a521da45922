"""A bridge in a process of its own, for tests that stop, pause or kill it.

``bridge_process.py MODE DIRECTORY``; says JSON lines on stdout, and takes lines
on stdin as permissions to go on.
"""

import asyncio
import json
import sys
from pathlib import Path

from host_bridge.kernels.kernel import Kernel, KernelSettings, KernelSpec
from host_bridge.kernels.registry import KernelRegistry
from host_bridge.paths import StateRoot
from kernel_ext.wire.envelope import OkReply

FLOOD = (
    "r = await asyncio.gather(*(host_request('t', {'n': n}) for n in range(2000)))\n"
    "[x['n'] for x in r] == [*range(2000)]"
)

STRAYS = (
    "import subprocess\n"
    "[subprocess.Popen(['sleep', '300']).pid,\n"
    " subprocess.Popen(['sleep', '300'], start_new_session=True).pid]"
)


def say(**facts):
    print(json.dumps(facts), flush=True)


class Bridge:
    def __init__(self, directory):
        self.directory = Path(directory)
        self.state = StateRoot(self.directory / "state", "the test's own")
        self.asked = []
        self.go = asyncio.Event()
        self.registry = KernelRegistry(KernelSettings(), dispatch=self.dispatch)

    async def dispatch(self, request, asker):
        self.asked.append(request.id)
        if request.type == "hold":
            say(asked="hold")
            await asyncio.Event().wait()
        if len(self.asked) == 256:
            say(asked=256)
        await self.go.wait()
        return OkReply(id=request.id, result=dict(request.payload))

    async def kernel(self, name) -> Kernel:
        spec = KernelSpec(
            agent_id=name,
            depth=0,
            cwd=self.directory,
            paths=self.state.session(name),
        )
        return await self.registry.kernel(spec)

    async def allowed(self):
        await asyncio.to_thread(sys.stdin.readline)

    async def flood(self):
        kernel = await self.kernel("a")
        cell = asyncio.create_task(kernel.execute(FLOOD))
        await self.allowed()
        self.go.set()
        result = await cell
        say(status=result.status, result=result.result, runs=len(self.asked))

    async def hold(self):
        kernel = await self.kernel("a")
        say(connection_file=str(kernel.connection_file), pid=kernel.pid)
        await self.allowed()

    async def live(self):
        kernels = [await self.kernel(name) for name in ("a", "b")]
        strays = (await kernels[0].execute(STRAYS)).result
        busy = asyncio.create_task(
            kernels[1].execute(
                "import time\nopen('busy', 'w').close()\ntime.sleep(300)"
            )
        )
        say(pids=[kernel.pid for kernel in kernels], strays=json.loads(strays))
        await self.allowed()
        busy.cancel()


async def main():
    mode, directory = sys.argv[1:]
    bridge = Bridge(directory)
    try:
        await getattr(bridge, mode)()
    finally:
        await bridge.registry.close()


asyncio.run(main())
