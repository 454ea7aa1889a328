/** What somebody at 3 a.m. must know of a job: banners, does it move, is it safe, do I need to act, what it waits for, and the newest incident. Draws what the models say. */
import { Link } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { call } from '../api/client'
import { useRole } from '../api/queries'
import type { Incident } from '../contract'
import { duration, sentence } from '../model/format'
import type { Answer } from '../model/incident'
import { statementHook as said } from '../model/figures'
import { phaseWords, type Act, type PhaseNow, type Statement, type Verdict } from '../model/verdict'
import { Ago, NodeLink, RunbookLink, ToneIcon, Unbroken } from './Basics'
import { Doing } from './Doing'
import { PhaseBar, PhaseLengths } from './IncidentTable'

export function FirstFold({ told, incident, answers }: { told: Verdict; incident?: Incident; answers: Answer[] }) {
  return (
    <>
      {told.banners.map((banner) => (
        <div key={banner.title} className={`banner tone-${banner.tone}`} role="status">
          <ToneIcon tone={banner.tone} />
          <span>
            <strong>{banner.title}.</strong> {banner.text}
          </span>
        </div>
      ))}
      <div className="fold">
        <Say question="Is it moving?" said={told.moving} attributes={said(told.figures, 'moving', told.moving)} />
        <Say question="Is it safe?" said={told.protection} attributes={said(told.figures, 'safe', told.protection)} />
        <ActCard act={told.act} />
        {told.waiting && <Say question="What it waits for" said={told.waiting} className="wide" />}
        {incident && <LastIncident incident={incident} answers={answers} now={told.recovery} />}
      </div>
    </>
  )
}

type Attributes = Record<`data-${string}`, string>

interface Says {
  question: string
  said: Statement
  className?: string
  attributes?: Attributes
  children?: React.ReactNode
}

export function Say({ question, said, className = '', attributes = {}, children }: Says) {
  return (
    <section className={`card say tone-${said.tone} ${className}`} aria-label={question} {...attributes}>
      <div className="q">{question}</div>
      <div className="a">
        <ToneIcon tone={said.tone} size={20} /> <span>{said.title}</span>
      </div>
      <p>{said.text}</p>
      {children}
    </section>
  )
}

export function ActCard({ act }: { act: Act }) {
  return (
    <section className={`card say act tone-${act.tone}`} aria-live="polite" aria-label="Do I need to act?">
      <div className="q">Do I need to act?</div>
      <div className="a">
        <ToneIcon tone={act.tone} size={20} /> <span>{act.title}</span>
      </div>
      <p>{act.text}</p>
      {act.steps.length > 0 && (
        <ol>
          {act.steps.map((step) => (
            <li key={step}>
              <Step text={step} nodes={act.nodes} />
            </li>
          ))}
        </ol>
      )}
      {act.section && (
        <p>
          <RunbookLink section={act.section} />
        </p>
      )}
    </section>
  )
}

/** What to do; the node that it begins with leads to that node. */
function Step({ text, nodes }: { text: string; nodes: Act['nodes'] }) {
  const id = nodes?.ids.find((each) => text.startsWith(`${each}:`))
  return id === undefined ? (
    <Unbroken text={text} />
  ) : (
    <>
      <NodeLink id={id} fleet={nodes?.fleet} />
      {text.slice(id.length)}
    </>
  )
}

/** The newest incident in four answers: the open one, or how the last one went. */
export function LastIncident({ incident, answers, now: current }: { incident: Incident; answers: Answer[]; now?: PhaseNow }) {
  const { mayRun } = useRole()
  const address = useJobAddress(incident)
  const isOpen = incident.ClosedAt === undefined
  const title = isOpen ? 'The incident now' : 'The last incident'
  return (
    <section className={`card say wide tone-${isOpen ? 'busy' : 'idle'}`} aria-label={title}>
      <div className="row between">
        <div className="q">{title}</div>
        <Link to={`/incidents/${encodeURIComponent(incident.IncidentId)}`}>
          {current ? `${sentence(phaseWords(current.phase)).slice(0, -1)} for ${duration(current.elapsedSeconds)}${current.usualSeconds === undefined ? '' : `, usually ${duration(current.usualSeconds)}`}` : 'Evidence, sources and events'}
        </Link>
      </div>
      <PhaseBar incident={incident} width="100%" height={8} />
      <div className="row" style={{ marginTop: 8 }}>
        {incident.AcknowledgementTime !== undefined ? (
          <span className="dim">
            Seen by {incident.AcknowledgedBy} <Ago at={incident.AcknowledgementTime} />
          </span>
        ) : (
          mayRun && <Doing does={() => call('AcknowledgeIncident', { IncidentId: incident.IncidentId })}>Acknowledge</Doing>
        )}
        <Link to={`/jobs/${encodeURIComponent(address)}/logs?failure=${encodeURIComponent(incident.IncidentId)}`}>What the ranks printed then</Link>
        <PhaseLengths incident={incident} />
      </div>
      <div className="story">
        {answers.map((each) => (
          <div key={each.question} className={`tone-${each.tone}`}>
            <div className="q">{each.question}</div>
            <div className="b">
              <ToneIcon tone={each.tone} /> <Unbroken text={each.title} />
            </div>
            <p><Unbroken text={each.text} /></p>
          </div>
        ))}
      </div>
    </section>
  )
}
