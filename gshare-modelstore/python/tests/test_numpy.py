"""NumPy arrays from the store, without a copy. Needs GSHARE_STORE_LIBRARY and a `gshare` on GSHARE_COMMAND."""

import gc
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy
from serving import GSHARE, serve

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import gshare_store  # noqa: E402


class NumpyTest(unittest.TestCase):
    def setUp(self) -> None:
        self.dir = tempfile.TemporaryDirectory()
        self.socket = os.path.join(self.dir.name, "store.sock")
        self.server = serve(self, self.socket, "--host", "256MiB")
        self.store = gshare_store.connect(self.socket)

    def tearDown(self) -> None:
        self.store.close()
        self.server.kill()
        self.server.wait()
        self.dir.cleanup()

    def references(self) -> int:
        import json

        command = [GSHARE, "store", "stat", "--json", "--socket", self.socket]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["host"]["references"]

    def test_what_was_put_is_read_by_dlpack_and_by_the_array_interface(self) -> None:
        arrays = {
            str(dtype): (numpy.arange(24) % 2).astype(dtype).reshape(2, 3, 4)
            for dtype in ["bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32",
                          "complex64", "float64", "int64", "uint64"]
        }
        arrays["scalar"] = numpy.array(3.5)
        arrays["empty"] = numpy.zeros((0, 7), dtype="float32")
        self.store.put("m", arrays, access=gshare_store.Access.PUBLIC)
        model = self.store.get("m")
        self.assertEqual(set(model), set(arrays))
        for name, array in arrays.items():
            for got in (numpy.from_dlpack(model[name]), numpy.asarray(model[name])):
                numpy.testing.assert_array_equal(got, array)
                self.assertEqual(got.dtype, array.dtype)
                self.assertFalse(got.flags.writeable, name)
                with self.assertRaises(ValueError):
                    got[...] = 0

    def test_an_array_is_no_copy_and_keeps_the_model_until_it_goes(self) -> None:
        self.store.put("m", {"w": numpy.ones(1 << 20, dtype="float32")})
        model, again = self.store.get("m"), self.store.get("m")
        one, two = numpy.from_dlpack(model["w"]), numpy.asarray(again["w"])
        self.assertEqual(one.ctypes.data, numpy.from_dlpack(model["w"]).ctypes.data)
        self.assertEqual(self.references(), 2)
        del model, again
        gc.collect()
        self.assertEqual(self.references(), 2, "the arrays hold it")
        self.assertEqual(float(one.sum() + two.sum()), float(2 << 20))
        del one, two
        gc.collect()
        self.assertEqual(self.references(), 0)
        capsule = self.store.get("m")["w"].__dlpack__(max_version=(1, 0))
        self.assertEqual(self.references(), 1)
        del capsule
        gc.collect()
        self.assertEqual(self.references(), 0, "a capsule that was not taken")

    def test_a_model_is_mapped_at_the_first_look(self) -> None:
        self.store.put("m", {"w": numpy.arange(1000)})
        maps = lambda: pathlib.Path("/proc/self/maps").read_text().count("gshare-arena")  # noqa: E731
        before, model = maps(), self.store.get("m")
        self.assertEqual((maps(), self.references()), (before, 1))
        self.server.kill()
        self.server.wait()
        numpy.testing.assert_array_equal(numpy.from_dlpack(model["w"]), numpy.arange(1000))
        self.assertEqual(maps(), before + 1, "also when the store is gone")

    def test_arrays_outlive_the_store(self) -> None:
        self.store.put("m", {"w": numpy.arange(1000)})
        array = numpy.from_dlpack(self.store.get("m")["w"])
        self.server.kill()
        self.server.wait()
        numpy.testing.assert_array_equal(array, numpy.arange(1000))
        with self.assertRaises(gshare_store.StoreError):
            self.store.get("m")

    def test_an_old_consumer_is_refused_rather_than_given_memory_it_may_write(self) -> None:
        self.store.put("m", {"w": numpy.arange(10)})
        with self.assertRaises(BufferError):
            self.store.get("m")["w"].__dlpack__()

    def test_errors_say_what_is_wrong(self) -> None:
        with self.assertRaisesRegex(gshare_store.StoreError, "no model"):
            self.store.get("nothing")
        with self.assertRaisesRegex(TypeError, "type"):
            self.store.put("m", {"w": numpy.array(["a"])})
        with self.assertRaisesRegex(ValueError, "contiguous"):
            self.store.put("m", {"w": numpy.ones((4, 4)).T[1:]})
        with self.assertRaises(gshare_store.StoreError) as raised:
            self.store.put("big", {"w": numpy.zeros(300 << 20, dtype="uint8")})
        self.assertEqual(raised.exception.code, 4)


# A program of its own, since it must find the driver when it starts: what is on the GPU, read by the driver.
ON_GPU = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[2])
import gshare_store
driver = ctypes.CDLL("libcuda.so.1")
store = gshare_store.connect(sys.argv[1])
host, model = store.get("m"), store.get("m", tier=gshare_store.GPU)
found = {}
for name, tensor in model.items():
    about = tensor.__cuda_array_interface__
    assert tensor.__dlpack_device__() == (2, 0) and about["version"] == 3 and about["shape"] == host[name].shape
    address, read_only = about["data"]
    assert read_only and (address % 256 == 0) and not hasattr(tensor, "__array_interface__")
    assert not hasattr(host[name], "__cuda_array_interface__")
    tensor.__dlpack__(stream=1, max_version=(1, 0))
    out = ctypes.create_string_buffer(tensor.nbytes + 1)
    if tensor.nbytes:
        assert driver.cuMemcpyDtoH_v2(out, ctypes.c_uint64(address), ctypes.c_size_t(tensor.nbytes)) == 0
    found[name] = [about["typestr"], out.raw[: tensor.nbytes].hex()]
print(json.dumps(found))
"""


class SimulatedGpuTest(unittest.TestCase):
    """Device memory on the simulated driver, which lies beside the library."""

    def test_a_tensor_on_the_gpu_has_the_array_interface_of_cuda(self) -> None:
        import json

        simulator = pathlib.Path(os.environ["GSHARE_STORE_LIBRARY"]).resolve().parent / "libfake_cuda.so"
        with tempfile.TemporaryDirectory() as directory:
            socket, arrays = os.path.join(directory, "store.sock"), {
                "w": numpy.arange(1000, dtype="float32"), "b": numpy.arange(6).reshape(2, 3), "none": numpy.zeros((0, 2))}
            for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"):
                os.symlink(simulator, os.path.join(directory, name))
            environment = os.environ | {
                "LD_LIBRARY_PATH": directory, "GSHARE_SIM_DEVICE": os.path.join(directory, "device"),
                "GSHARE_SIM_PROFILE": "v100"}
            server = serve(self, socket, "--gpu", "64MiB", **environment)
            try:
                with gshare_store.connect(socket) as store:
                    store.put("m", arrays)
                    with self.assertRaisesRegex(gshare_store.StoreError, "driver"):
                        store.get("m", tier=gshare_store.GPU)["w"]  # without a driver in this process
                package = str(pathlib.Path(gshare_store.__file__).resolve().parent.parent)
                client = subprocess.run([sys.executable, "-c", ON_GPU, socket, package], env=environment, capture_output=True)
                self.assertEqual(client.returncode, 0, client.stderr.decode())
                found = json.loads(client.stdout)
                for name, array in arrays.items():
                    self.assertEqual(found[name], [array.dtype.str, array.tobytes().hex()])
            finally:
                server.kill()
                server.wait()


if __name__ == "__main__":
    unittest.main()
