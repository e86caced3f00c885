//! One figure of a report as bars: a group per input, a bar per policy.
//!
//! A cell of the figure that holds no number has no bar. Rows of a time series, which have a `second`, are left out.

use super::{ABOUT, Report, cell, keys};
use anyhow::{Result, bail};
use plotters::prelude::*;
use serde_json::{Map, Value};

/// Colours that colour-blind people can tell apart (Okabe and Ito, 2008); more policies begin again.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
    RGBColor(0, 0, 0),
];

/// The bars of a figure, and their names.
struct Bars {
    figure: String,
    policies: Vec<String>,
    inputs: Vec<String>,
    /// Number of the input, number of the policy, height.
    bars: Vec<(usize, usize, f64)>,
}

/// The report as an SVG: a drawing of its own, or bars of `figure`, its first one where none is named.
///
/// # Errors
/// A figure that no row has, with those that there are.
pub fn svg(report: &Report, figure: Option<&str>) -> Result<String> {
    if let (Some(drawing), None) = (&report.drawing, figure) {
        return Ok(drawing.clone());
    }
    let bars = bars(report, figure)?;
    let mut svg = String::new();
    draw(report.scenario, &bars, &mut svg).map_err(|error| anyhow::anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

fn bars(report: &Report, figure: Option<&str>) -> Result<Bars> {
    let rows: Vec<_> = report.rows.iter().filter(|row| !row.contains_key("second")).cloned().collect();
    let figures: Vec<_> = keys(&rows).into_iter().filter(|key| !ABOUT.contains(&key.as_str())).collect();
    let figure = match figure {
        Some(name) => figures.iter().find(|one| **one == name),
        None => figures.iter().find(|name| rows.iter().any(|row| height(row, name).is_some())),
    };
    let Some(figure) = figure else {
        let names: Vec<_> = figures.iter().map(|one| one.as_str()).collect();
        bail!("--figure: {} has no such column; it has {}", report.scenario, names.join(", "));
    };
    let mut found =
        Bars { figure: (*figure).clone(), policies: Vec::new(), inputs: Vec::new(), bars: Vec::new() };
    for row in &rows {
        let Some(height) = height(row, figure) else { continue };
        let input = ABOUT.iter().filter(|key| **key != "policy" && row.contains_key(**key));
        let input = input.map(|key| cell(row, key)).collect::<Vec<_>>().join(" ");
        let input = number_of(&mut found.inputs, input);
        let policy = number_of(&mut found.policies, cell(row, "policy"));
        found.bars.push((input, policy, height));
    }
    if found.bars.is_empty() {
        bail!("--figure {figure}: no row of {} has a number there", report.scenario);
    }
    Ok(found)
}

fn height(row: &Map<String, Value>, figure: &str) -> Option<f64> {
    row.get(figure).and_then(Value::as_f64).filter(|height| height.is_finite())
}

fn number_of(names: &mut Vec<String>, name: String) -> usize {
    names.iter().position(|one| *one == name).unwrap_or_else(|| {
        names.push(name);
        names.len() - 1
    })
}

fn draw(title: &str, of: &Bars, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    // A free bar's width at both sides of a group.
    let group = of.policies.len() + 1;
    let wide = u32::try_from(of.inputs.len() * group * 14 + 160)?.clamp(560, 2_400);
    let tall = 300 + u32::try_from(of.policies.len())? * 18;
    let area = SVGBackend::with_string(svg, (wide, tall)).into_drawing_area();
    area.fill(&WHITE)?;
    let heights = of.bars.iter().map(|(_, _, height)| *height);
    let (low, high) = heights.fold((0.0_f64, 0.0_f64), |(low, high), one| (low.min(one), high.max(one)));
    let room = ((high - low) * 0.05).max(f64::MIN_POSITIVE);
    let (plot, legend) = area.split_vertically(300);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(34)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..(of.inputs.len() * group) as f64, low..high + room)?;
    // A tick in the middle of each group, as far as their names have room.
    let name = |at: &f64| {
        let input = (*at / group as f64).floor();
        of.inputs
            .iter()
            .zip(0u32..)
            .find(|(_, number)| f64::from(*number) == input)
            .map_or_else(String::new, |(name, _)| name.clone())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(of.inputs.len().min(12))
        .x_label_formatter(&name)
        .y_desc(of.figure.as_str())
        .draw()?;
    chart.draw_series(of.bars.iter().map(|&(input, policy, height)| {
        let left = (input * group + policy) as f64 + 0.5;
        Rectangle::new([(left, 0.0), (left + 0.9, height)], COLOURS[policy % COLOURS.len()].filled())
    }))?;
    for (number, policy) in of.policies.iter().enumerate() {
        let top = i32::try_from(number)? * 18;
        let colour = COLOURS[number % COLOURS.len()];
        legend.draw(&Rectangle::new([(74, top), (86, top + 12)], colour.filled()))?;
        legend.draw(&Text::new(policy.clone(), (92, top), ("sans-serif", 13)))?;
    }
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::row;
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("a figure", vec![1]);
        for (policy, load, late) in [("ours", 0.5, 1.0), ("paper", 0.5, 2.0), ("ours", 1.0, 4.0)] {
            report.rows.push(row(&[("policy", policy.into()), ("load", load.into()), ("late", late.into())]));
        }
        report.rows.push(row(&[("policy", "ours".into()), ("second", 3.into()), ("late", 9.into())]));
        report
    }

    #[test]
    fn a_group_per_input_and_a_bar_per_policy() {
        let found = bars(&report(), None).unwrap();
        assert_eq!((found.figure.as_str(), found.policies), ("late", vec!["ours".into(), "paper".into()]));
        assert_eq!(found.inputs, ["0.500", "1.000"]);
        assert_eq!(found.bars, [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 4.0)]);
        let svg = svg(&report(), None).unwrap();
        assert!(["a figure", "late", "ours", "paper"].iter().all(|word| svg.contains(word)), "{svg}");
    }

    #[test]
    fn a_figure_that_is_not_there_is_named_with_those_that_are() {
        let error = svg(&report(), Some("load")).unwrap_err().to_string();
        assert_eq!(error, "--figure: a figure has no such column; it has late");
    }

    #[test]
    fn a_drawing_of_its_own_comes_first() {
        let mut report = report();
        report.drawing = Some("<svg/>".to_owned());
        assert_eq!(svg(&report, None).unwrap(), "<svg/>");
        assert!(svg(&report, Some("late")).unwrap().contains("paper"));
    }
}
