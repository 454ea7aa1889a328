// @vitest-environment jsdom
/**
 * No page contradicts itself or another page, in random stories that the real control plane produced.
 *
 * A story is a random sequence of failures and user requests. At a few moments, it records all answers of the API.
 *
 * `tests/dashboard/stories.py` records the stories and names their folder in EVERSTEP_STORIES. Without it, only the
 * rules themselves are tested.
 */
import { readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest'

import { pagesOf, render_pages, unanswered, type Moment } from './stories/moment'
import * as rules from './stories/rules'

beforeAll(() => void vi.useFakeTimers({ toFake: ['Date'] }))
afterAll(() => void vi.useRealTimers())

/** Return all complaints about the pages at one recorded moment of a story. */
async function complaints(moment: Moment): Promise<string[]> {
  const wrong: string[] = []
  const shown: rules.Shown[] = []
  const known = rules.numbersIn(moment)
  await render_pages(moment, pagesOf(moment), (page, address) => {
    shown.push(...rules.figuresOn(page, address))
    wrong.push(...rules.sensible(page, address), ...rules.mentioned(page, address, known))
    const [, job = '', tab] = /^\/jobs\/([^/]+)\/(metrics|logs)$/.exec(address) ?? []
    if (tab === 'logs') wrong.push(...rules.printedLines(page, moment, job))
    if (tab === 'metrics') wrong.push(...rules.charted(page, moment, job))
    if (address === '/reports') wrong.push(...rules.reported(page, moment))
  })
  wrong.push(...rules.agree(shown), ...rules.readable(shown), ...rules.addUp(shown), ...rules.supported(shown, moment))
  wrong.push(...rules.accounted(moment), ...rules.buried(moment))
  const some = pagesOf(moment).filter(
    (address) => ['/', '/fleets'].includes(address) || /^\/jobs\/[^/]+$/.test(address),
  )
  await render_pages(moment, some, (page, address) => wrong.push(...rules.grey(page, address)), 60)
  return [...new Set(wrong)]
}

const folder = process.env.EVERSTEP_STORIES
const files = folder ? readdirSync(folder).filter((name) => name.endsWith('.json')) : []

describe.runIf(files.length > 0)('the pages of a random story agree', () => {
  test.each(files)('%s', { timeout: 120_000 }, async (file) => {
    const moments = JSON.parse(readFileSync(join(folder!, file), 'utf8')) as Moment[]
    for (const moment of moments) {
      const found = await complaints(moment)
      expect(found, `seed ${moment.seed}, moment ${moment.number}, after ${moment.acts.join(', ')}`).toEqual([])
    }
  })
  afterAll(() => void (unanswered.size && console.warn(`no answers for ${[...unanswered].join(', ')}`)))
})

describe('the rules find', () => {
  const page = (html: string) => {
    const element = document.createElement('main')
    element.innerHTML = html
    return element
  }
  const figure = (name: string, value: string, text: string, tone = '') =>
    `<b data-figure="${name}" data-of="job/a" data-value="${value}" ${tone && `data-tone="${tone}"`}>${text}</b>`
  const on = (...figures: string[]) => rules.figuresOn(page(figures.join('')), '/jobs/a')

  test('a figure that has two values', () => {
    expect(rules.agree(on(figure('step', '7', '7'), figure('step', '7', 'step 7')))).toEqual([])
    expect(rules.agree(on(figure('step', '7', '7'), figure('step', '8', '8')))).toHaveLength(1)
    expect(
      rules.agree(on(figure('status', 'Training', '', 'good'), figure('status', 'Training', '', 'warn'))),
    ).toHaveLength(1)
  })
  test('a text without its value', () => {
    expect(rules.readable(on(figure('step', '1204', 'step 1,204'), figure('step', '', '–')))).toEqual([])
    expect(rules.readable(on(figure('step', '1204', 'step 1,203'), figure('step', '', 'step 3')))).toHaveLength(2)
  })
  test('values that the program lacks', () => {
    expect(rules.sensible(page('<i title="step 3">a nullable NaNny</i>'), '/')).toEqual([])
    expect(rules.sensible(page('<i title="step undefined">NaN steps</i>'), '/')).toHaveLength(2)
  })
  test('phases that do not add up', () => {
    const phases = ['unaccounted', 'detect', 'replace'].map((phase) => figure(`${phase}-seconds`, '2', '2.0 s'))
    expect(rules.addUp(on(figure('total-seconds', '6', '6.0 s'), ...phases))).toEqual([])
    expect(rules.addUp(on(figure('total-seconds', '4', '4.0 s'), ...phases))).toHaveLength(1)
  })
  test('green on a stale page', () => {
    const framed = (figure: string) => page(`<div class="app is-stale">${figure}</div>`)
    expect(rules.grey(framed(figure('protection', 'Unknown', 'Unknown', 'idle')), '/')).toEqual([])
    expect(rules.grey(framed(figure('protection', 'Protected', 'Protected', 'good')), '/')).toHaveLength(1)
    expect(rules.grey(page(''), '/')).toHaveLength(1)
  })
  describe('in reports, logs and metrics', () => {
    const job = { TrainingJobName: 'a', RunId: 'a', AccountingSeconds: { train: 90 } }
    const moment = {
      answers: {
        'GET /v1/training-jobs': { TrainingJobSummaries: [job] },
        'GET /v1/training-jobs/a': job,
        'GET /v1/training-jobs/a/nodes': { Nodes: [] },
        'GET /v1/training-jobs/a/time-spans': { TimeSpans: [] },
        'GET /v1/incidents': {
          Incidents: [
            { Cause: 'hang', LostSteps: 3 },
            { Cause: 'drill', LostSteps: 4 },
          ],
        },
        'GET /v1/nodes': { Nodes: [] },
        'GET /v1/events': { Events: [] },
        'GET /v1/training-jobs/a/logs/events': { Events: [{ Message: 'step 7' }, { Message: 'step 8' }] },
        'GET /v1/training-jobs/a/metric-data': { MetricDataResults: [{ MetricName: 'loss' }] },
      },
    } as unknown as Moment
    const report = (steps: string, ettr: string) =>
      page(`<b data-figure="report-recomputed-steps">${steps}</b><b data-figure="report-ettr">${ettr}<i>note</i></b>`)
    test('other figures than those of incidents and jobs', () => {
      expect(rules.reported(report('3', '90 %'), moment)).toEqual([])
      expect(rules.reported(report('7', '–'), moment)).toHaveLength(2)
      expect(rules.reported(page(''), moment)).toHaveLength(1)
    })
    const lines = (...texts: string[]) =>
      page(`<div role="log">${texts.map((text) => `<p class="line">12:00:00 ${text}</p>`).join('')}</div>`)
    test('lines that the log lacks, or that the page lacks', () => {
      expect(rules.printedLines(lines('step 7', 'step 8'), moment, 'a')).toEqual([])
      expect(rules.printedLines(lines('step 7', 'step 9'), moment, 'a')).toHaveLength(1)
      expect(rules.printedLines(lines('step 7'), moment, 'a')).toHaveLength(1)
    })
    test('a metric without a chart', () => {
      expect(rules.charted(page('<section class="card chart"></section>'), moment, 'a')).toEqual([])
      expect(rules.charted(page(''), moment, 'a')).toHaveLength(1)
    })
  })
  test('a step that nobody reported', () => {
    expect(rules.mentioned(page('at step 1,204'), '/', new Set(['1204']))).toEqual([])
    expect(rules.mentioned(page('at step 1,205'), '/', new Set(['1204']))).toHaveLength(1)
  })
})
