//! A function for the OpenFaaS host: see [`gshare_openfaas::gpu_function`].

fn main() -> anyhow::Result<()> {
    gshare_openfaas::gpu_function::main()
}
