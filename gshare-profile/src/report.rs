//! A page that a person can read: what was measured, what was chosen, and plots.
//!
//! One HTML file without anything from elsewhere: plots are SVG drawings in it.

use crate::planner::Outcome;
use crate::run::Record;
use crate::stats::Interval;
use gshare_core::profile::ProfilePoint;
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Why a plot could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw {plot}: {reason}")]
pub struct ReportError {
    /// Which plot.
    pub plot: &'static str,
    /// The reason that the drawing library gives.
    pub reason: String,
}

/// The text of a page above its plots.
#[derive(Debug, Clone, Default)]
pub struct Head {
    /// Name of the profile.
    pub name: String,
    /// The function that was profiled, and how.
    pub context: String,
    /// The findings, a line each.
    pub found: Vec<String>,
}

/// Draws a plot of a point's figure over SM shares.
struct Plot {
    name: &'static str,
    unit: &'static str,
    of: fn(&ProfilePoint) -> f64,
    /// Where the figure may lie.
    interval: fn(&Record) -> Option<Interval>,
}

/// By batch size and quota: SM share in per cent, figure, interval.
type Lines = BTreeMap<(u32, u16), Vec<(f64, f64, Option<Interval>)>>;

const PLOTS: [Plot; 3] = [
    Plot {
        name: "Throughput",
        unit: "requests per second",
        of: |point| point.throughput.as_f64(),
        interval: |record| record.measured.map(|measured| measured.throughput),
    },
    Plot {
        name: "Throughput per SM and time",
        unit: "requests per second and per cent of the GPU",
        of: |point| point.throughput.as_f64() / (point.sm.as_fraction() * point.quota.as_fraction() * 100.0),
        interval: |_| None,
    },
    Plot {
        name: "Latency",
        unit: "p95 of a batch in ms",
        of: |point| point.p95.as_secs_f64() * 1e3,
        interval: |_| None,
    },
];

const SIZE: (u32, u32) = (720, 400);

/// The page of these records.
pub fn html(head: &Head, records: &[Record]) -> Result<String, ReportError> {
    let mut page = String::new();
    let (name, context) = (escape(&head.name), escape(&head.context));
    // Writing to a String cannot fail.
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{name}</title>\n<style>body{{font:15px \
         sans-serif;max-width:60em;margin:2em auto}}td,th{{padding:.15em .8em;text-align:right}}</style>\n\
         <h1>{name}</h1>\n<p>{context}</p>\n"
    );
    for line in &head.found {
        let _ = writeln!(page, "<p><b>{}</b></p>", escape(line));
    }
    if records.iter().any(|record| record.measured.is_some()) {
        for plot in &PLOTS {
            let svg = plot.draw(records)?;
            let _ = writeln!(page, "<h2>{}</h2>\n{svg}", plot.name);
        }
    }
    page.push_str(
        "<h2>Trials</h2>\n<table><tr><th>batch<th>SMs<th>time<th>requests/s<th>from<th>to<th>p50 \
         ms<th>p95 ms<th>p99 ms<th>calls<th>busy %<th>SMs %<th>occupancy %</tr>\n",
    );
    for record in records {
        let at = record.trial.setting;
        let _ = write!(page, "<tr><td>{}<td>{}<td>{}", at.batch, at.sm, at.quota);
        let _ = match (&record.trial.outcome, &record.measured) {
            (Outcome::Failed { reason }, _) => writeln!(page, "<td colspan=10>{}</tr>", escape(reason)),
            (Outcome::Measured(found), measured) => {
                let ms = |time: gshare_core::Duration| time.as_secs_f64() * 1e3;
                let seen = measured.and_then(|m| m.utilisation).unwrap_or_default();
                let (rate, p99, calls) =
                    measured.map_or((None, None, 0), |m| (Some(m.throughput), Some(m.p99), m.calls));
                let end = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
                writeln!(
                    page,
                    "<td>{:.2}<td>{}<td>{}<td>{:.2}<td>{:.2}<td>{}<td>{calls}<td>{}<td>{}<td>{}</tr>",
                    found.point.throughput.as_f64(),
                    end(rate.map(|rate| rate.low)),
                    end(rate.map(|rate| rate.high)),
                    ms(found.point.p50),
                    ms(found.point.p95),
                    end(p99.map(ms)),
                    end(seen.busy_percent),
                    end(seen.sm_percent),
                    end(seen.occupancy_percent),
                )
            }
        };
    }
    page.push_str("</table>\n</html>\n");
    Ok(page)
}

impl Plot {
    /// One line per batch size and quota.
    fn draw(&self, records: &[Record]) -> Result<String, ReportError> {
        let mut lines = Lines::new();
        for record in records {
            if let Outcome::Measured(found) = &record.trial.outcome {
                let point = &found.point;
                let line = lines.entry((point.batch, point.quota.get())).or_default();
                line.push((point.sm.as_fraction() * 100.0, (self.of)(point), (self.interval)(record)));
            }
        }
        for line in lines.values_mut() {
            line.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        let highest = lines.values().flatten().map(|(_, y, _)| *y).fold(0.0, f64::max);
        let mut svg = String::new();
        self.draw_into(&mut svg, &lines, highest * 1.08)
            .map_err(|error| ReportError { plot: self.name, reason: error.to_string() })?;
        Ok(svg)
    }

    fn draw_into(
        &self,
        svg: &mut String,
        lines: &Lines,
        top: f64,
    ) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..104.0, 0.0..top)?;
        chart
            .configure_mesh()
            .x_desc("share of the SMs in per cent")
            .y_desc(self.unit)
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (number, ((batch, quota), points)) in lines.iter().enumerate() {
            let colour = Palette99::pick(number).to_rgba();
            let series = LineSeries::new(points.iter().map(|(x, y, _)| (*x, *y)), colour.stroke_width(2))
                .point_size(3);
            chart
                .draw_series(series)?
                .label(format!("batch {batch}, {}% of the time", quota / 100))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
            let bars = points.iter().filter_map(|(x, _, interval)| {
                let interval = (*interval)?;
                let high = interval.high.min(top);
                Some(PathElement::new([(*x, interval.low), (*x, high)], colour.stroke_width(1)))
            });
            chart.draw_series(bars)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.2))
            .draw()?;
        area.present()
    }
}

/// Text as it may stand in HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::simulated_gpu;
    use crate::planner::{Grid, Journal, Trial};
    use crate::run::{Sink, run};
    use crate::trial::TrialConfig;
    use gshare_core::profile::ProfileTable;
    use gshare_core::{BasisPoints, Duration, Quota, SmShare};

    struct Keep(Vec<Record>);

    impl Sink for Keep {
        fn keep(&mut self, record: &Record) -> Result<(), Box<dyn core::error::Error + Send + Sync>> {
            self.0.push(record.clone());
            Ok(())
        }
    }

    #[test]
    fn a_page_has_the_plots_the_choice_and_every_trial_and_nothing_unescaped() {
        let sms = [20, 60, 100].map(|percent| SmShare::from_percent(percent).unwrap());
        let point = |sm: SmShare| {
            let rate = sm.as_fraction() * 100.0;
            let exec = core::time::Duration::from_secs_f64(1.0 / rate).into();
            ProfilePoint::measured(sm, Quota::WHOLE, 1, rate, exec, exec).unwrap()
        };
        let table = ProfileTable::grid(sms.map(point).to_vec()).unwrap();
        let noise = BasisPoints::from_percent(5).unwrap();
        let mut gpu = simulated_gpu(table, Duration::from_millis(1), noise, 1);
        let grid = Grid::new(sms.to_vec(), vec![Quota::WHOLE], vec![1]).unwrap();
        let mut keep = Keep(Vec::new());
        run(&grid, &mut gpu, &TrialConfig::default(), &mut Journal::default(), &mut keep).unwrap();
        let setting = gshare_core::profile::Setting { batch: 64, sm: sms[0], quota: Quota::WHOLE };
        let failed = Trial::failed(setting, "<out of memory>".to_owned());
        keep.0.push(Record { trial: failed, measured: None });
        let found = vec!["60% of the SMs".to_owned()];
        let head = Head { name: "a<b".into(), context: "x & y".into(), found };
        let page = html(&head, &keep.0).unwrap();
        assert_eq!(page.matches("<svg").count(), 3);
        assert_eq!(page.matches("<tr>").count(), 1 + 4);
        assert!(page.contains("60% of the SMs") && page.contains("&lt;out of memory&gt;"));
        assert!(page.contains("a&lt;b") && !page.contains("a<b") && page.contains("x &amp; y"));
        assert!(!page.contains("http://") || page.contains("http://www.w3.org/2000/svg"));
        assert!(html(&Head::default(), &[]).unwrap().contains("<table>"), "of nothing, too");
    }
}
