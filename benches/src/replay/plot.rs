//! A report as an SVG. One of its figures as bars: a group per input, a bar per policy. A time series, whose rows have a `second`,
//! as lines: a panel per input and figure, a line per policy.
//!
//! A cell of the figure that holds no number is left out.

use super::{ABOUT, Report, cell, keys};
use anyhow::{Result, bail};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
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

/// The report as an SVG: lines of all that is in its time series or only of `figure`, or else bars of `figure`, its first one where
/// none is named.
///
/// # Errors
/// A figure that no row has, with those that there are.
pub fn svg(report: &Report, figure: Option<&str>) -> Result<String> {
    let panels = panels(report, figure);
    let mut svg = String::new();
    let drawn = match panels.is_empty() {
        true => draw(report.scenario, &bars(report, figure)?, &mut svg),
        false => draw_lines(report.scenario, &panels, &mut svg),
    };
    drawn.map_err(|error| anyhow::anyhow!("cannot draw: {error}"))?;
    Ok(svg)
}

/// The lines of a panel: its name, and the policy and the points of each, by second.
type Panel = (String, Vec<(String, Vec<(f64, f64)>)>);

fn panels(report: &Report, figure: Option<&str>) -> Vec<Panel> {
    let rows: Vec<_> = report.rows.iter().filter(|row| row.contains_key("second")).cloned().collect();
    let figures = keys(&rows).into_iter().filter(|key| !ABOUT.contains(&key.as_str()));
    let figures: Vec<_> = figures.filter(|key| figure.is_none_or(|figure| figure == *key)).collect();
    let mut panels: Vec<Panel> = Vec::new();
    for row in &rows {
        let Some(second) = height(row, "second") else { continue };
        let policy = cell(row, "policy");
        for &figure in &figures {
            let Some(height) = height(row, figure) else { continue };
            let name = format!("{} {figure}", input(row, &["policy", "second", "seed"]));
            let panel = panels.iter().position(|(one, _)| one == name.trim()).unwrap_or_else(|| {
                panels.push((name.trim().to_owned(), Vec::new()));
                panels.len() - 1
            });
            let lines = &mut panels[panel].1;
            // Time that begins again is another run.
            match lines.iter_mut().rfind(|(of, _)| *of == policy) {
                Some((_, line)) if line.last().is_some_and(|last| last.0 < second) => {
                    line.push((second, height));
                }
                _ => lines.push((policy.clone(), vec![(second, height)])),
            }
        }
    }
    panels
}

/// The columns that a row is about, without some, as one name.
fn input(row: &Map<String, Value>, without: &[&str]) -> String {
    let about = ABOUT.iter().filter(|key| !without.contains(key) && row.contains_key(**key));
    about.map(|key| cell(row, key)).collect::<Vec<_>>().join(" ")
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
        let input = number_of(&mut found.inputs, input(row, &["policy"]));
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
    let (area, plot) = paper(svg, (wide, 300), &of.policies)?;
    let heights = of.bars.iter().map(|(_, _, height)| *height);
    let (low, high) = heights.fold((0.0_f64, 0.0_f64), |(low, high), one| (low.min(one), high.max(one)));
    let room = ((high - low) * 0.05).max(f64::MIN_POSITIVE);
    let mut chart = ChartBuilder::on(&plot)
        .caption(title, ("sans-serif", 16))
        .margin(10)
        .x_label_area_size(34)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..(of.inputs.len() * group) as f64, low..high + room)?;
    chart.configure_mesh().disable_x_mesh().x_labels(0).y_desc(of.figure.as_str()).draw()?;
    // A name below the middle of each group, as far as names have room.
    let centred = Pos::new(HPos::Center, VPos::Top);
    let style = TextStyle::from(("sans-serif", 12).into_font()).pos(centred);
    for (number, name) in of.inputs.iter().enumerate().step_by(of.inputs.len().div_ceil(12).max(1)) {
        let middle = (number * group) as f64 + group as f64 / 2.0;
        let (x, y) = chart.plotting_area().map_coordinate(&(middle, low));
        area.draw_text(name, &style, (x, y + 8))?;
    }
    chart.draw_series(of.bars.iter().map(|&(input, policy, height)| {
        let left = (input * group + policy) as f64 + 0.5;
        Rectangle::new([(left, 0.0), (left + 0.9, height)], COLOURS[policy % COLOURS.len()].filled())
    }))?;
    area.present()?;
    Ok(())
}

type Drawing<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// White paper with the colours of the policies at its foot, and the part of it above them.
fn paper<'a>(
    svg: &'a mut String,
    (wide, tall): (u32, u32),
    policies: &[String],
) -> Result<(Drawing<'a>, Drawing<'a>), Box<dyn std::error::Error>> {
    let foot = u32::try_from(policies.len())? * 18;
    let area = SVGBackend::with_string(svg, (wide, tall + foot)).into_drawing_area();
    area.fill(&WHITE)?;
    let (plot, legend) = area.split_vertically(tall);
    for (number, policy) in policies.iter().enumerate() {
        let top = i32::try_from(number)? * 18;
        let colour = COLOURS[number % COLOURS.len()];
        legend.draw(&Rectangle::new([(74, top), (86, top + 12)], colour.filled()))?;
        legend.draw(&Text::new(policy.clone(), (92, top), ("sans-serif", 13)))?;
    }
    Ok((area, plot))
}

fn draw_lines(title: &str, panels: &[Panel], svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let mut policies = Vec::new();
    for (policy, _) in panels.iter().flat_map(|(_, lines)| lines) {
        number_of(&mut policies, policy.clone());
    }
    let tall = 30 + u32::try_from(panels.len())? * 180;
    let (area, plot) = paper(svg, (760, tall), &policies)?;
    let plot = plot.titled(title, ("sans-serif", 16))?;
    let points = || panels.iter().flat_map(|(_, lines)| lines).flat_map(|(_, line)| line);
    let last = points().map(|point| point.0).fold(1.0, f64::max);
    for (part, (name, lines)) in plot.split_evenly((panels.len(), 1)).iter().zip(panels) {
        let high = lines.iter().flat_map(|(_, line)| line).map(|point| point.1).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(part)
            .margin(8)
            .x_label_area_size(34)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..last, 0.0..high * 1.05)?;
        chart.configure_mesh().x_desc("seconds").y_desc(name.as_str()).y_labels(5).draw()?;
        for (policy, line) in lines {
            let colour = COLOURS[number_of(&mut policies, policy.clone()) % COLOURS.len()];
            // A value holds until the next one.
            let steps = line.windows(2).flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
            chart.draw_series(LineSeries::new(steps.chain(line.last().copied()), colour))?;
        }
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
    fn a_panel_per_figure_over_time_and_a_line_per_run_of_a_policy() {
        let mut report = report();
        for (second, late) in [(3, 9.0), (5, 2.0), (0, 7.0)] {
            let at = [("policy", "ours".into()), ("second", second.into()), ("late", late.into())];
            report.rows.push(row(&at));
        }
        let ours = |points: &[(f64, f64)]| ("ours".to_owned(), points.to_vec());
        let lines = vec![ours(&[(3.0, 9.0), (5.0, 2.0)]), ours(&[(0.0, 7.0)])];
        assert_eq!(panels(&report, None), [("late".to_owned(), lines)]);
        let svg = svg(&report, Some("late")).unwrap();
        assert!(["a figure", "seconds", "late", "ours"].iter().all(|word| svg.contains(word)), "{svg}");
    }
}
