//! A function for the OpenFaaS host: see [`gshare_openfaas::gpu_function`].

fn main() -> std::process::ExitCode {
    gshared::report::exit(gshare_openfaas::gpu_function::main())
}
