"""The tool of `tools4`, which verifiers runs as a module in a process of its own."""

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig, vf.State]):  # type: ignore[misc]
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


if __name__ == "__main__":
    Adding.run()
