use super::*;

fn plan(rest: &str) -> Result<Plan, String> {
    let body = format!(r#"{{"service":"f","image":"/bin/true",{rest}}}"#);
    let deployment: FunctionDeployment =
        super::super::api::parse(body.as_bytes()).map_err(|error| error.message)?;
    let tenants = BTreeMap::from([("blue".to_owned(), TenantId::new(1))]);
    Plan::of(&deployment, &tenants).map_err(|error| error.message)
}

#[test]
fn the_page_of_settings_has_every_annotation() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/settings.md");
    let page = std::fs::read_to_string(page).unwrap();
    for (key, meaning) in KEYS {
        let row = format!("| `{key}` | {meaning} |");
        assert!(page.contains(&row), "docs/settings.md needs\n{row}");
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (rest, field) in [
        (r#""namespace":"other""#, "namespace"),
        (r#""envVars":{"A=B":"1"}"#, "envVars"),
        (r#""labels":{"com.openfaas.scale.min":"-1"}"#, "com.openfaas.scale.min"),
        (r#""labels":{"com.openfaas.scale.min":"5","com.openfaas.scale.max":"4"}"#, "com.openfaas.scale.min"),
        (
            r#""annotations":{"fastgshare/gpu_quota_request":"1.5"}"#,
            "annotations: fastgshare/gpu_quota_request: `1.5` is out of range",
        ),
        (r#""annotations":{"fastgshare/gpu_mem":"half"}"#, "annotations: fastgshare/gpu_mem: `half` is"),
        (r#""annotations":{"fastgshare/gpu_sm_partition":"24"}"#, "gpu_quota_request"),
        (r#""annotations":{"fastgshare/colour":"red"}"#, "fastgshare/colour"),
        (r#""annotations":{"gshare/requests_per_second":"many"}"#, "gshare/requests_per_second"),
        (r#""annotations":{"gshare/requests_per_second":"NaN"}"#, "gshare/requests_per_second"),
        (r#""annotations":{"gshare/concurrency":"0"}"#, "need 1 to 64"),
        (r#""annotations":{"gshare/batch":"257"}"#, "gshare/batch: `257`: need 1 to 256"),
        (r#""annotations":{"gshare/batch":"8","gshare/concurrency":"2"}"#, "need one of both"),
        (r#""annotations":{"gshare/batch":"8","gshare/regime":"whole"}"#, "need gshare/regime fractional"),
        (r#""annotations":{"gshare/park":"no"}"#, "gshare/park: `no`: need true or false"),
        (r#""annotations":{"gshare/park":"true","gshare/devices":"2"}"#, "with one GPU for each process"),
        (r#""annotations":{"gshare/conc":"1"}"#, "gshare/slo (time in which"),
        (r#""annotations":{"slo":"69ms"}"#, "unknown `slo`: need `gshare/slo`"),
        (r#""annotations":{"model":"m","gshare/slo":"1s"}"#, "unknown `model`: need `gshare/model`"),
        (r#""annotations":{"probe_path":"/"}"#, "need `gshare/probe_path`"),
        (r#""annotations":{"gpu_mem":"1GiB"}"#, "unknown `gpu_mem`: need"),
        (r#""annotations":{"GShare/SLO":"69ms"}"#, "unknown `GShare/SLO`: need `gshare/slo`"),
        (r#""annotations":{"gshare/workload_":"training"}"#, "need `gshare/workload`"),
        (r#""annotations":{"gshare.slo":"69ms"}"#, "need `gshare/slo`"),
        (r#""annotations":{"quota_request":"0.5"}"#, "need `faasshare/gpu_quota_request`"),
        (r#""annotations":{"fastgshare/gpu_quota_reqest":"0.5"}"#, "need `fastgshare/gpu_quota_request`"),
        (r#""annotations":{"gshare/devices":"65"}"#, "gshare/devices: `65`: need 1 to 64"),
        (
            r#""annotations":{"gshare/devices":"2","gshare/workload":"training"}"#,
            "gshare/devices: `2`: need an inference function with a GPU",
        ),
        (r#""annotations":{"gshare/slo":"69"}"#, "annotations: gshare/slo: `69` is not a length of time"),
        (r#""annotations":{"gshare/slo":"0ms"}"#, "more than 0"),
        (r#""annotations":{"gshare/model":"/no/such"}"#, "gshare/model: `/no/such`"),
        (r#""annotations":{"gshare/class":"gold"}"#, "slo-sensitive or best-effort"),
        (r#""annotations":{"gshare/workload":"batch"}"#, "inference, pipeline or training"),
        (r#""annotations":{"gshare/workload":"pipeline"}"#, "gshare/dag"),
        (r#""annotations":{"gshare/workload":"training","gshare/workers":"65"}"#, "need 1 to 64"),
        (r#""annotations":{"gshare/profile":"/no/such"}"#, "gshare/profile: `/no/such`"),
        (r#""annotations":{"gshare/tenant":"red"}"#, "there are: blue"),
        (r#""annotations":{"gshare/regime":"half"}"#, "fractional, sliced or whole"),
        (r#""annotations":{"gshare/probe_path":"x"}"#, "begins with `/`"),
        (r#""limits":{"nvidia.com/gpu":"0.5"}"#, "nvidia.com/gpu"),
        (r#""limits":{"memory":"much"}"#, "limits: memory: `much`: need bytes"),
        (r#""limits":{"memory":"0Mi"}"#, "limits: memory"),
        (r#""limits":{"memory":"99999999999Ti"}"#, "limits: memory"),
        (r#""limits":{"cpu":"5m"}"#, "limits: cpu: `5m`"),
        (r#""limits":{"cpu":"-1"}"#, "limits: cpu"),
    ] {
        let error = plan(rest).unwrap_err();
        assert!(error.contains(field), "{rest}: {error}");
    }
}

#[test]
fn a_program_that_is_not_here_is_told() {
    let missing = |program: &str, path| {
        let body = format!(r#"{{"service":"f","image":"{program}"}}"#);
        let deployment: FunctionDeployment = serde_json::from_str(&body).unwrap();
        Plan::of(&deployment, &BTreeMap::new()).unwrap().missing_program(path)
    };
    assert_eq!((missing("/bin/sh -c true", None), missing("sh", Some("/bin"))), (None, None));
    let why = missing("/nope/prog", None).unwrap();
    assert!(why.contains("`/nope/prog`: this host has no such program"), "{why}");
    assert!(missing("sh", Some("/nope")).is_some() && missing("/etc/passwd", None).is_some());
    assert_eq!(missing("localhost/f:1", None), None, "an image is podman's to find");
}

#[test]
fn an_image_with_a_registry_is_run_and_any_other_is_a_name_or_a_program() {
    let plan = |rest: &str| {
        let body = format!(r#"{{"service":"f",{rest}}}"#);
        let deployment: FunctionDeployment = serde_json::from_str(&body).unwrap();
        let plan = Plan::of(&deployment, &BTreeMap::new()).map_err(|error| error.message)?;
        let image = plan.image.as_ref().map(Image::to_string);
        Ok::<_, String>((image, plan.command.join(" "), plan.program()))
    };
    let image = || Some("localhost/f:1".to_owned());
    let whole = |image: Option<String>, command: &str, program: &str| {
        Ok((image, command.to_owned(), program.to_owned()))
    };
    assert_eq!(plan(r#""image":"localhost/f:1""#), whole(image(), "", "localhost/f:1"));
    let command = r#""image":"localhost/f:1","envProcess":"python3 serve.py""#;
    assert_eq!(plan(command), whole(image(), "python3 serve.py", "localhost/f:1"));
    let named = r#""image":"resnet:1","envProcess":"/opt/serve -q""#;
    assert_eq!(plan(named), whole(None, "/opt/serve -q", "/opt/serve"));
    assert_eq!(plan(r#""image":"./a.b/run:1 -q""#), whole(None, "./a.b/run:1 -q", "./a.b/run:1"));
    for (rest, part) in [
        (r#""image":"functions/alpine:latest""#, "has a tag and no registry"),
        (r#""image":"localhost/F""#, "`localhost` is read as a registry"),
    ] {
        let error = plan(rest).unwrap_err();
        assert!(error.starts_with("image: `") && error.contains(part), "{error}");
    }
}

#[test]
fn a_deployment_says_what_it_gets_or_what_it_wants() {
    let given = plan(
        r#""annotations":{"fastgshare/gpu_quota_request":"0.3","fastgshare/gpu_quota_limit":"0.8",
        "fastgshare/gpu_sm_partition":"24","fastgshare/gpu_mem":"1073741824","topic":"cron",
        "gshare/requests_per_second":"27.5"},"labels":{"com.openfaas.scale.max":"8"}"#,
    )
    .unwrap();
    let spec = given.spec(given.bounds, Bytes::from_gib(4)).unwrap();
    let Work::Inference { profile: Some(table) } = &spec.work else { panic!("{spec:?}") };
    assert_eq!((table.points()[0].throughput.as_milli(), spec.memory), (27_500, Bytes::from_gib(1)));
    assert_eq!((spec.time_limit, given.bounds, given.scales()), (Quota::from_percent(80), (1, 8), true));

    let long = format!("gshare.{}", "slo".repeat(1_000_000));
    let others = format!(
        r#""annotations":{{"model":"m","profile":"p","load":"1","batch":"2","class":"c","tenant":"t","devices":"d",
        "workers":"w","mem":"1","gpu_model":"H100","{long}":"1"}}"#
    );
    let others = plan(&others).unwrap();
    assert!(others.model.is_none() && others.batch.is_none(), "other programs' keys are left alone");

    let slo = plan(r#""annotations":{"gshare/slo":"69ms","gshare/tenant":"blue"}"#).unwrap();
    assert_eq!((&slo.wants, slo.tenant), (&Wants::Measured, TenantId::new(1)));
    let spec = slo.spec(slo.bounds, Bytes::from_gib(4)).unwrap();
    assert_eq!((spec.slo, spec.memory), (Some(Duration::from_millis(69)), Bytes::from_gib(4)));

    assert_eq!((spec.time_limit, slo.class), (None, Some(ServiceClass::SLO_SENSITIVE)));
    let class = |annotations: &str| plan(&format!(r#""annotations":{{{annotations}}}"#)).unwrap().class;
    assert_eq!(class(r#""gshare/slo":"69ms","gshare/class":"best-effort""#), Some(ServiceClass::BestEffort));
    assert_eq!(class(r#""gshare/workload":"training""#), Some(ServiceClass::BestEffort));
    assert_eq!(class(r#""gshare/profile":"none","gshare/slo":"69ms""#), None);
    assert_eq!(class(r#""gshare/concurrency":"1""#), None);

    let plain = plan(r#""labels":{"a":"b"}"#).unwrap();
    assert_eq!((plain.wants, plain.bounds), (Wants::Measured, (1, 20)));
    let trains = plan(r#""annotations":{"gshare/workload":"training","gshare/workers":"2"}"#).unwrap();
    let Wants::Training { workers: 2, share } = trains.wants else { panic!("{:?}", trains.wants) };
    assert_eq!(share.time().to_string(), "10%:100%");
}
