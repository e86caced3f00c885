use super::*;

#[test]
fn a_lost_device_is_told_with_the_reason() {
    let text = r#"{"devices":[{"gpu":0},{"gpu":1,"lost":"it has fallen off the bus"}],"functions":[]}"#;
    let lines = losses(&serde_json::from_str::<State>(text).unwrap().devices);
    assert!(lines.len() == 1 && lines[0].contains("GPU 1") && lines[0].ends_with("the bus"), "{lines:?}");
}

#[test]
fn a_function_without_use_of_a_gpu_has_no_figures_of_one() {
    let text = r#"{"name":"cpu","state":"serving","slo_ns":null,"answered":9,"within_slo":0,"waiting":0,"gpu_seconds":0.0,
        "instances":[{"life":"ready"}],"clients":[]}"#;
    let row = row(&serde_json::from_str(text).unwrap());
    assert_eq!(row[7..9], ["-", "-"]);
}

#[test]
fn a_function_is_one_line() {
    let text = r#"{"name":"resnet","state":"serving","slo_ns":69000000,"answered":200,"within_slo":199,"waiting":1,
        "gpu_seconds":2.04,"instances":[{"life":"ready"},{"life":"parked"}],
        "clients":[{"quota_request":0.2,"measured":0.31}],"more":1}"#;
    let of: Function = serde_json::from_str(text).unwrap();
    assert_eq!(row(&of).join(" "), "resnet serving 1/2 69ms 200 99.5% 1 20.0% 31.0% 2.0");
}
