import { Link } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { call } from '../api/client'
import { useRole } from '../api/queries'
import type { Incident } from '../contract'
import type { Answer } from '../model/incident'
import { JOB } from '../words/job'
import { ActionButton } from './ActionButton'
import { Ago, ToneIcon, Unbroken } from './Basics'
import { Card } from './Card'
import { PhaseBar, PhaseLengths } from './IncidentTable'

/** The open incident of a job, or its latest one: its phases, four answers, and links to the details. */
export function LatestIncident({ incident, answers }: { incident: Incident; answers: Answer[] }) {
  const { mayRun } = useRole()
  const address = useJobAddress(incident)
  const words = JOB.incident
  const title = incident.ClosedAt === undefined ? words.open : words.last
  const id = encodeURIComponent(incident.IncidentId)
  const actions = (
    <>
      {incident.AcknowledgementTime !== undefined ? (
        <span className="dim">
          {JOB.acknowledgedBy(incident.AcknowledgedBy ?? '')} <Ago at={incident.AcknowledgementTime} />
        </span>
      ) : (
        mayRun && (
          <ActionButton action={() => call('AcknowledgeIncident', { IncidentId: incident.IncidentId })}>
            {JOB.acknowledge}
          </ActionButton>
        )
      )}
      <Link className="link" to={`/jobs/${encodeURIComponent(address)}/logs?failure=${id}`}>{words.log}</Link>
      <Link className="link" to={`/incidents/${id}`}>{words.all}</Link>
    </>
  )
  return (
    <Card title={title} label={title} actions={actions}>
      <PhaseBar incident={incident} width="100%" height={6} />
      <PhaseLengths incident={incident} />
      <div className="story">
        {answers.map((each) => (
          <div key={each.question} className={`tone-${each.tone}`}>
            <div className="q">{each.question}</div>
            <div className="b">
              <ToneIcon tone={each.tone} /> <Unbroken text={each.title} />
            </div>
            <p>
              <Unbroken text={each.text} />
            </p>
          </div>
        ))}
      </div>
    </Card>
  )
}
